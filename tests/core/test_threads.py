"""No thread of ours ends silently."""

from __future__ import annotations

import ast
import errno
import io
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import hydroslurm
from hydroslurm.core.threads import say, thread

PACKAGE = Path(hydroslurm.__file__).parent


def _calls(name: str) -> Iterator[tuple[Path, ast.Call]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if "hread(" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name:
                yield path, node


def test_every_thread_reports_what_ends_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All are made in one place; each of their names is told, even where SystemExit ends it."""
    places = {path.relative_to(PACKAGE).as_posix() for path, _ in _calls("Thread")}
    assert places == {"core/threads.py"}
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    names = [
        ast.unparse(word.value).strip("f'\"")
        for _, call in _calls("thread")
        for word in call.keywords
        if word.arg == "name" and not ast.unparse(call.func).startswith("threading")
    ]
    assert len(names) > 20
    for name in names:
        for error in (ZeroDivisionError, SystemExit):

            def fail(error: type[BaseException] = error) -> None:
                raise error

            ended = thread(fail, name=name)
            ended.start()
            ended.join()
            told = capfd.readouterr().err
            assert name in told
            assert error.__name__ in told


class Full(io.StringIO):
    """A stream on a full disk."""

    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_line_that_nobody_can_hear_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """stderr may be missing, closed, or on a full disk."""
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed, Full()):
        monkeypatch.setattr(sys, "stderr", stream)
        say("nothing")

"""A real terminal: tmux, with a server of its own."""

from __future__ import annotations

import shlex
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from processes import wait_until


class Terminal:
    """A program in a terminal of 80 by 24."""

    def __init__(self, folder: Path, environ: Mapping[str, str], program: Sequence[str]) -> None:
        self._socket = f"hydroslurm-{uuid.uuid4().hex[:12]}"
        self._environ = {**environ, "TMUX_TMPDIR": str(folder), "LC_ALL": "C.UTF-8", "PS1": "$ "}
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", *program)

    def type(self, words: Sequence[str]) -> None:
        """A command, and Enter."""
        self.press("-l", shlex.join(words))
        self.press("Enter")

    def press(self, *keys: str) -> None:
        """Keys by tmux's names, ``C-c``."""
        self._tmux("send-keys", *keys)

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def text(self) -> str:
        return self._tmux("capture-pane", "-p")

    def history(self) -> str:
        """What was ever on the screen."""
        return self._tmux("capture-pane", "-p", "-J", "-S", "-")

    def lines(self) -> list[str]:
        return self.text().rstrip("\n").split("\n")

    def modes(self) -> tuple[str, str]:
        """Whether the cursor is seen, and whether the alternate screen is on: ``1`` or ``0``."""
        seen, alternate = self._tmux("display", "-p", "#{cursor_flag} #{alternate_on}").split()
        return seen, alternate

    def until(self, condition: Callable[[], object], what: str) -> None:
        try:
            wait_until(condition, what)
        except AssertionError:
            raise AssertionError(f"no {what}; on the screen:\n{self.text()}") from None

    def close(self) -> None:
        self._tmux("kill-server")

    def _tmux(self, *words: str) -> str:
        return subprocess.run(
            ["tmux", "-u", "-L", self._socket, *words],
            env=self._environ,
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout


SHELL = ("bash", "--norc", "--noprofile")
Open = Callable[..., Terminal]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Open]:
    """Opens a terminal: the environment of its programs, and another program than a shell."""
    opened: list[Terminal] = []

    def open_terminal(environ: Mapping[str, str], *program: str) -> Terminal:
        opened.append(Terminal(tmp_path, environ, program or SHELL))
        if not program:
            opened[-1].until(lambda: "$" in opened[-1].text(), "a prompt")
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()

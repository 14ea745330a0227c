"""hydroslurm.core.files: reading what anybody may have written, atomic writes, growing files."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydroslurm.core import files
from hydroslurm.core.files import atomic_file, fsync_together, new_lines, write_atomically


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """FIFOs, links, folders, sockets and devices are refused at once and named."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "socket"))
    server.close()
    for name, word in (
        (tmp_path / "fifo", "a FIFO"),
        (tmp_path / "link", "a symbolic link"),
        (tmp_path, "a folder"),
        (tmp_path / "socket", "a socket"),
        (Path("/dev/zero"), "a device"),
    ):
        with pytest.raises(OSError, match=word):
            files.read_regular(name, limit_bytes=10)


def test_a_long_file_is_not_read(tmp_path: Path) -> None:
    """The bound holds, and what is within it is read whole."""
    (tmp_path / "f").write_bytes(b"x" * 11)
    assert files.read_regular(tmp_path / "f", limit_bytes=11) == b"x" * 11
    with pytest.raises(OSError, match="longer than the 10 bytes"):
        files.read_regular(tmp_path / "f", limit_bytes=10)


@pytest.mark.parametrize(
    "text",
    ["NaN", "[Infinity]", "-Infinity", "1e999", "9" * 400, "9" * 5000, str(1 << 63), "[" * 60_000,
     "[" * 65 + "]" * 65, '{"a":' * 100_000, r'"\ud800"', "{", "", b"\xff\xfe", b"\xef\xbb\xbf1",
     "[1]".encode("utf-16-le"), b'"\xed\xa0\x80"'],
    ids=lambda text: str(text)[:12],
)  # fmt: skip
def test_hostile_json_is_a_value_error(text: str | bytes) -> None:
    """Whatever is written there, bytes that are no text too, the caller sees one kind of error."""
    with pytest.raises(ValueError):
        files.parse_json(text)


MANY = 4 << 20
LONG = {
    "unclosed": b'"' + b'\\"' * (MANY // 2),
    "quotes": b"[" * 65 + b'"' * MANY,
    "escapes": b"[" * 65 + b"\\" * MANY,
    "one string": b'"' + b"[" * MANY + b'"',
    "escaped string": b'"' + b'[\\"' * (MANY // 3) + b'"',
    "digits": b"9" * MANY,
    "fraction": b"0." + b"9" * MANY,
    "exponent": b"1e" + b"9" * MANY,
    "flat": b"[" + b"[]," * (MANY // 3) + b"[]]",
    "keys": b"{" + b'"[":[],' * (MANY // 7) + b'"":0}',
    "nothing": bytes(MANY),
    "blanks": b" " * MANY,
    "no text": b"\xff" * MANY,
}


def test_long_json_costs_what_it_is_long() -> None:
    """4 MiB of whatever a scanner might go back over: a value or a ValueError, in the time of a
    pass or two and in memory for the text and its values. A quadratic reader takes days."""
    pid = os.fork()
    if pid == 0:
        most = Path("/proc/self/statm").read_text().split()[0]
        resource.setrlimit(
            resource.RLIMIT_AS, (int(most) * resource.getpagesize() + (1 << 28),) * 2
        )
        for text in LONG.values():
            for read in (files.parse_json, files.decode_json):
                with contextlib.suppress(ValueError):
                    read(text)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


_TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False, allow_infinity=False) | st.text('"\\[]{}aé\ud83d\x00', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"[\\', max_size=3), inner),
)  # fmt: skip


@given(tree=_TREES, cut=st.integers(0, 400), most=st.integers(0, 6))
def test_json_is_what_the_library_reads_up_to_a_depth(tree: Any, cut: int, most: int) -> None:
    """Any value, as text or bytes, is read as ``json`` reads it if it is no deeper than that, and
    refused if it is; any beginning of it is a value or a ValueError, too. Pairs of surrogates are
    one character."""
    assert files.parse_json(r'"\ud83d\ude00"') == "\U0001f600"

    def depth(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value
        is_leaf = not isinstance(value, (dict, list))
        return 0 if is_leaf else 1 + max(map(depth, inner), default=0)

    text = json.dumps(tree)
    for read in (files.decode_json, functools.partial(files.parse_json, printable=False)):
        for form in (text, text.encode()):
            if depth(tree) <= most:
                assert read(form, max_depth=most) == tree
            else:
                with pytest.raises(ValueError, match="nested deeper"):
                    read(form, max_depth=most)
            with contextlib.suppress(ValueError):
                read(form[:cut], max_depth=most)


def test_a_written_file_is_whole_and_private(tmp_path: Path) -> None:
    """The content is replaced, the mode is the one asked for, and nothing else is left: neither by
    a write that fails, which changes nothing, nor by the second of two exclusive writers, nor by
    two at once with the same pid (two containers), of which the last one wins."""
    path = tmp_path / "state.json"
    write_atomically(path, "old", exclusive=True)
    with pytest.raises(FileExistsError):
        write_atomically(path, "second", exclusive=True)
    with pytest.raises(TypeError), atomic_file(path) as file:
        file.writelines([b"half of the n", "text"])  # type: ignore[list-item]
    assert path.read_text() == "old"
    with atomic_file(path) as slow:
        slow.write(b"slow")
        write_atomically(path, "new", durable=True)
        assert path.read_text() == "new"
        assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == "slow"
    assert list(tmp_path.iterdir()) == [path]


def test_new_lines_are_complete_and_come_once(tmp_path: Path) -> None:
    """A torn last line comes when it is complete; the file need not exist at first."""
    path = tmp_path / "log"
    assert new_lines(path, 0) == ([], 0)
    path.write_bytes(b"one\ntw")
    assert new_lines(path, 0) == ([b"one"], 4)
    with path.open("ab") as file:
        file.write(b"o\n\nthree")
    assert new_lines(path, 4) == ([b"two", b""], 9)
    assert new_lines(path, 9) == ([], 9)


def test_a_line_without_an_end_costs_no_memory(tmp_path: Path) -> None:
    """It is passed over, and the line after it is not."""
    path, end = tmp_path / "log", files.MOST_LINE_BYTES * 3
    path.write_bytes(b"x" * end + b"\nafter\n")
    offset = 0
    while offset < end:
        lines, offset = new_lines(path, offset)
        assert lines == []
    assert new_lines(path, offset)[0] == [b"", b"after"]


def test_files_are_synced_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file and folder is synced; one that is not there is an error, after the others."""
    synced = set[int]()
    real = os.fsync

    def sync(fd: int) -> None:
        real(fd)
        synced.add(os.fstat(fd).st_ino)

    monkeypatch.setattr(os, "fsync", sync)
    paths = [tmp_path, tmp_path / "one", tmp_path / "two"]
    for path in paths[1:]:
        path.write_text("content")
    fsync_together(paths)
    assert synced == {path.stat().st_ino for path in paths}
    synced.clear()
    with pytest.raises(FileNotFoundError):
        fsync_together([tmp_path / "missing", *paths])
    assert len(synced) == 3

"""hydroslurm.files: what may be obeyed, and what may be shown."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hydroslurm import files
from hydroslurm.errors import UntrustedFile

ME = os.getuid()
as_root = pytest.mark.skipif(ME != 0, reason="needs root, to give files to somebody else")


def _tree(tmp_path: Path) -> Path:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True, mode=0o755)
    for one in (tmp_path / "a", folder):
        one.chmod(0o755)
    file = folder / "lib.so"
    file.write_text("x")
    file.chmod(0o644)
    return file


def test_our_own_file_is_trusted(tmp_path: Path) -> None:
    """A file of ours in folders of ours, below a sticky /tmp, is trusted."""
    files.check_trusted(_tree(tmp_path), what="the library")


@pytest.mark.parametrize("where", ["a", "a/b", "a/b/lib.so"])
def test_what_others_can_write_is_not_trusted(tmp_path: Path, where: str) -> None:
    """One place on the way that everybody can write is enough; the message names it."""
    file = _tree(tmp_path)
    (tmp_path / where).chmod(0o777)
    with pytest.raises(UntrustedFile, match=rf"others can write {tmp_path / where} "):
        files.check_trusted(file, what="the library")


@as_root
@pytest.mark.parametrize("where", ["a", "a/b", "a/b/lib.so"])
def test_what_somebody_else_owns_is_not_trusted(tmp_path: Path, where: str) -> None:
    """Another owner could change it at any time, whatever its mode is."""
    file = _tree(tmp_path)
    os.chown(tmp_path / where, 12345, 12345)
    with pytest.raises(UntrustedFile, match="belongs to uid 12345"):
        files.check_trusted(file, what="the library")


def test_links_are_followed(tmp_path: Path) -> None:
    """A link of ours into a folder that others can write is not trusted."""
    file = _tree(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(file.parent)
    files.check_trusted(link / "lib.so", what="the library")
    (tmp_path / "a").chmod(0o777)
    with pytest.raises(UntrustedFile, match="others can write"):
        files.check_trusted(link / "lib.so", what="the library")


def test_a_ring_of_links_ends(tmp_path: Path) -> None:
    """Links that lead to each other are an OSError, not a hang."""
    (tmp_path / "x").symlink_to(tmp_path / "y")
    (tmp_path / "y").symlink_to(tmp_path / "x")
    files_seen = files.is_trusted(tmp_path / "x" / "lib.so")
    assert files_seen is False


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
    [
        "NaN",
        "[Infinity]",
        "-Infinity",
        "1e999",
        "9" * 400,
        "9" * 5000,
        str(1 << 63),
        "[" * 60_000,
        "[" * 65 + "]" * 65,
        '{"a":' * 100_000,
        r'"\ud800"',
        "{",
        "",
    ],
    ids=lambda text: text[:12],
)
def test_hostile_json_is_a_value_error(text: str) -> None:
    """Whatever is written there, the caller sees one kind of error."""
    with pytest.raises(ValueError):
        files.parse_json(text)


def test_bytes_that_are_no_text_are_a_value_error() -> None:
    """Not a UnicodeDecodeError of another family: that one is a ValueError already."""
    with pytest.raises(ValueError, match="decode"):
        files.parse_json(b"\xff\xfe")


def test_plain_json_is_read() -> None:
    """Brackets within texts count for nothing, and pairs of surrogates are one character."""
    text = '{"a": [1, -2.5, null, true, "' + "[" * 500 + r'\"{", "😀"]}'
    assert files.parse_json(text)["a"][4] == "[" * 500 + '"{'
    assert files.parse_json(r'"\ud83d\ude00"') == "\U0001f600"
    assert files.parse_json(str((1 << 63) - 1)) == (1 << 63) - 1

"""hydroslurm.core.trust: what may be obeyed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hydroslurm.core import trust
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


@pytest.mark.parametrize("where", ["a", "a/b", "a/b/lib.so"])
def test_what_others_can_write_is_not_trusted(tmp_path: Path, where: str) -> None:
    """One place on the way that everybody can write is enough; the message names it."""
    file = _tree(tmp_path)
    (tmp_path / where).chmod(0o777)
    with pytest.raises(UntrustedFile, match=rf"others can write {tmp_path / where} "):
        trust.check_trusted(file, what="the library")


@as_root
@pytest.mark.parametrize("where", ["a", "a/b", "a/b/lib.so"])
def test_what_somebody_else_owns_is_not_trusted(tmp_path: Path, where: str) -> None:
    """Another owner could change it at any time, whatever its mode is; ``owners`` are believed as
    root is, also for code."""
    file = _tree(tmp_path)
    trust.check_trusted(file, what="the library")
    os.chown(tmp_path / where, 12345, 12345)
    trust.check_trusted(file, what="the library", owners={12345})
    with pytest.raises(UntrustedFile, match="belongs to uid 12345"):
        trust.check_trusted(file, what="the library")


def test_links_are_followed(tmp_path: Path) -> None:
    """A link of ours into a folder that others can write is not trusted."""
    file = _tree(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(file.parent)
    trust.check_trusted(link / "lib.so", what="the library")
    (tmp_path / "a").chmod(0o777)
    with pytest.raises(UntrustedFile, match="others can write"):
        trust.check_trusted(link / "lib.so", what="the library")


def test_a_ring_of_links_ends(tmp_path: Path) -> None:
    """Links that lead to each other are an OSError, not a hang."""
    (tmp_path / "x").symlink_to(tmp_path / "y")
    (tmp_path / "y").symlink_to(tmp_path / "x")
    files_seen = trust.is_trusted(tmp_path / "x" / "lib.so")
    assert files_seen is False


@as_root
def test_a_folder_that_people_share_is_enough_for_a_run(tmp_path: Path) -> None:
    """Folders above that are a colleague's and a group's are taken with ``shared``, and without it
    they are not; the file itself must be ours, and nobody else's to write."""
    file = _tree(tmp_path)
    for place in (tmp_path / "a", tmp_path / "a" / "b"):
        os.chown(place, 12345, 12345)
        place.chmod(0o2770)
    assert trust.is_trusted(file, shared=True)
    assert not trust.is_trusted(file)
    os.chown(file, 0, 12345)
    file.chmod(0o664)
    assert not trust.is_trusted(file, shared=True)
    os.chown(file, 12345, 12345)
    file.chmod(0o644)
    assert not trust.is_trusted(file, shared=True)


@as_root
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_strangers_folder_in_everybodys_is_not_shared(tmp_path: Path, mode: int) -> None:
    """Where anybody can make a folder, one of somebody else's is no project folder; nor is a link
    there to what is ours: its owner can let it lead elsewhere."""
    file = _tree(tmp_path)
    os.chown(tmp_path / "a" / "b", 12345, 12345)
    assert trust.is_trusted(file, shared=True)
    (tmp_path / "a").chmod(mode)
    assert not trust.is_trusted(file, shared=True)
    os.chown(tmp_path / "a" / "b", ME, ME)
    link = tmp_path / "a" / "link"
    link.symlink_to(file.parent)
    assert trust.is_trusted(link / "lib.so", shared=True) == (mode == 0o1777)
    os.lchown(link, 12345, 12345)
    assert not trust.is_trusted(link / "lib.so", shared=True)


@as_root
def test_a_containers_view_of_root_is_believed() -> None:
    """In a user namespace without root, as Apptainer makes it, / and /home belong to "nobody":
    what is ours below them is still trusted, and a file of a stranger's is not, nor what lies in a
    folder that anybody could have made."""
    with tempfile.TemporaryDirectory(prefix="hs-", dir="/opt") as name:
        Path(name).chmod(0o755)
        file = _tree(Path(name))
        for place in (file, file.parent):
            os.chown(place, 12345, 12345)
        theirs = Path(name) / "a" / "theirs.so"
        theirs.write_text("x")
        os.chown(theirs, 23456, 23456)
        assert _as_seen_from_a_container(file, theirs) == "[True, False]\n"
        file.parent.parent.parent.chmod(0o1777)
        assert _as_seen_from_a_container(file, theirs) == "[False, False]\n"


def _as_seen_from_a_container(*paths: Path) -> str:
    """Which are trusted by uid 12345 in a namespace that has no other user."""
    code = """
import ctypes, os, sys
from pathlib import Path
from hydroslurm.core import trust
if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):
    sys.exit(os.strerror(ctypes.get_errno()))
print("ready", flush=True)
input()
os.setresuid(1000, 1000, 1000)
print([trust.is_trusted(Path(one)) for one in sys.argv[1:]])
"""
    command = [sys.executable, "-c", code, *map(str, paths)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        if child.stdout.readline() != "ready\n":
            pytest.skip(f"no user namespaces here: {child.stderr.read().strip()}")
        Path(f"/proc/{child.pid}/uid_map").write_text("1000 12345 1\n")
        said, failure = child.communicate("\n", timeout=60)
    assert not failure
    return said

"""A real second user of this machine, and what that one can do to us."""

from __future__ import annotations

import fcntl
import os
import pwd
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NAME = "hs-stranger"
PYTHON = "/usr/bin/python3"
"""Our own may lie in a home folder that a stranger cannot enter."""


@dataclass(frozen=True)
class Stranger:
    """Another ordinary user.

    Attributes:
        home: a folder of theirs that we can enter, and write as root.
    """

    uid: int
    gid: int
    home: Path

    def popen(self, *command: str, env: Mapping[str, str] = {}, **options: Any) -> Any:
        """Start a program as that user."""
        environ = {"PATH": "/usr/bin:/bin:/usr/sbin", "HOME": str(self.home), **env}
        who = {"user": self.uid, "group": self.gid, "extra_groups": []}
        return subprocess.Popen(command, env=environ, cwd="/", text=True, **who, **options)

    def run(self, *command: str, check: bool = True, **options: Any) -> str:
        """Run a program as that user; returns what it prints."""
        pipes = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
        }
        with self.popen(*command, **pipes, **options) as process:
            words: str = process.communicate(timeout=120)[0]
        assert process.returncode == 0 or not check, words
        return words

    def python(self, code: str, *arguments: str, **options: Any) -> str:
        """Run a Python program (standard library only) as that user; returns what it prints."""
        return self.run(PYTHON, "-c", textwrap.dedent(code), *arguments, **options)

    def plant(self, path: Path, text: str = "") -> None:
        """A file of theirs that everybody may write, and the folders above it."""
        script = 'umask 0; mkdir -p "${1%/*}"; printf %s "$2" >"$1"'
        self.run("sh", "-c", script, "sh", str(path), text)


@pytest.fixture(scope="session")
def stranger() -> Iterator[Stranger]:
    """The user is made by the first test that needs one, and stays: workers side by side share it.
    Only root can make one; CI is root."""
    if os.getuid() != 0:
        pytest.skip("only root can make a second user")
    with Path(tempfile.gettempdir(), f"{NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            entry = pwd.getpwnam(NAME)
        except KeyError:
            command = ["useradd", "--system", "--no-create-home", "--shell", "/bin/sh", NAME]
            subprocess.run(command, check=True, capture_output=True)
            entry = pwd.getpwnam(NAME)
    with tempfile.TemporaryDirectory(prefix="hs-stranger-") as folder:
        home = Path(folder)
        os.chown(home, entry.pw_uid, entry.pw_gid)
        home.chmod(0o755)
        yield Stranger(entry.pw_uid, entry.pw_gid, home)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder like /tmp: everybody may make files there, and remove their own. Not below pytest's
    own folder, which every session that begins closes to strangers again."""
    with tempfile.TemporaryDirectory(prefix="hs-scratch-") as name:
        folder = Path(name)
        folder.chmod(0o1777)
        yield folder


@pytest.fixture
def lab(stranger: Stranger) -> Iterator[Path]:
    """A project folder, drwxrws---, of a group that the stranger is in, too: a colleague."""
    with tempfile.TemporaryDirectory(prefix="hs-lab-") as name:
        folder = Path(name)
        os.chown(folder, 0, stranger.gid)
        folder.chmod(0o2770)
        yield folder

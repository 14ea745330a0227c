"""Finding a process by its pid."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hydroslurm.core import registry
from hydroslurm.errors import RunFolderError


def _entry(pid: int, started: int) -> registry.Entry:
    return registry.Entry(pid=pid, started=started, rank=0, events="/e", signals={"user_pause": 10})


def test_a_living_process_is_found(tmp_path: Path) -> None:
    """What was announced is read back while the process lives. The same pid with another start time
    is another process."""
    registry.announce(tmp_path, _entry(os.getpid(), 1))
    assert registry.find(tmp_path, os.getpid()) is None
    mine = _entry(os.getpid(), registry.start_ticks(os.getpid()) or 0)
    registry.announce(tmp_path, mine)
    assert registry.find(tmp_path, os.getpid()) == mine
    registry.withdraw(tmp_path, os.getpid())
    assert registry.find(tmp_path, os.getpid()) is None
    assert list(tmp_path.iterdir()) == []


def test_what_dead_processes_left_is_swept(tmp_path: Path) -> None:
    """A killed process's entry and private events go when the next one announces itself."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    registry.announce(tmp_path, _entry(child.pid, registry.start_ticks(child.pid) or 0))
    registry.private_events(tmp_path, child.pid).mkdir()
    child.kill()
    child.communicate()
    registry.announce(tmp_path, _entry(os.getpid(), registry.start_ticks(os.getpid()) or 0))
    assert list(tmp_path.iterdir()) == [registry.entry_file(tmp_path, os.getpid())]


def test_what_another_pid_namespace_has_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container, or a node that shares the folder, numbers its processes itself: its entry is
    neither swept, nor found, nor written over by the process of the same number here."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(registry, "place", lambda: "00000000")
        registry.announce(tmp_path, _entry(os.getpid(), 1))
        theirs = registry.entry_file(tmp_path, os.getpid())
        registry.private_events(tmp_path, os.getpid()).mkdir()
    before = theirs.read_text()
    assert registry.find(tmp_path, os.getpid()) is None
    registry.announce(tmp_path, _entry(os.getpid(), registry.start_ticks(os.getpid()) or 0))
    registry.withdraw(tmp_path, os.getpid())
    assert theirs.read_text() == before
    assert {one.name for one in tmp_path.iterdir()} == {theirs.name, theirs.stem}


def test_a_name_with_spaces_and_parentheses_is_no_trouble(tmp_path: Path) -> None:
    """The start time is read right from a process with a hostile name."""
    name = tmp_path / "a) (b 1 2 3"
    name.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(name), "60"])
    try:
        assert (
            (registry.start_ticks(child.pid) or 0) >= (registry.start_ticks(os.getpid()) or 0) > 0
        )
    finally:
        child.kill()
        child.wait()


def test_somebody_elses_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry folder that another user made first is not trusted."""
    (tmp_path / "hydroslurm").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 424242)
    with pytest.raises(RunFolderError, match="belongs to uid"):
        registry.folder({"XDG_RUNTIME_DIR": str(tmp_path)})

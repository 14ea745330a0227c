"""What torch tells about this rank's collectives, with real gloo groups of three ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from forkedranks import start, wait_for_end
from zygote import forked_program

from hydroslurm.coordination import collectives

WORLD = 3
PROGRAM = Path(__file__).with_name("group_scenes.py")
BUFFER = {
    "the_recorder_wraps": {"TORCH_FR_BUFFER_SIZE": "4"},
    "there_is_no_recorder": {"TORCH_FR_BUFFER_SIZE": "0"},
}

SCENES = {
    "keys_are_the_same_on_all_members": "each group of several ranks has one key, its members'",
    "every_collective_counts": "each kind of collective counts one, and is complete in the end",
    "sends_and_receives_are_taken_out": "the exact numbers are those of the collectives alone",
    "what_waits_for_a_peer_is_in_flight": "a collective is in flight until its last rank comes",
    "the_recorder_wraps": "no number is made up for a group whose entries are gone",
    "there_is_no_recorder": "without the recorder nothing is claimed",
    "a_backend_is_not_recorded": "nothing is claimed of a group whose backend it does not know",
    "a_group_that_was_destroyed_is_forgotten": "a new group of the same name starts at nothing",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool | str]:
    """True of a scene that held, and else all that the ranks have said."""
    folder = tmp_path_factory.mktemp("groups")
    said = {}
    with forked_program(PROGRAM, folder) as ranks:
        ranks.expect("ready")
        for scene in SCENES:
            environ = BUFFER.get(scene, {})
            start(ranks, WORLD, scene=scene, meet=str(folder / scene), environ=environ)
            said[scene] = wait_for_end(ranks, WORLD) == {0: 0, 1: 0, 2: 0} or str(ranks)
    return said


@pytest.mark.parametrize("scene", list(SCENES), ids=list(SCENES.values()))
def test_groups_of_three_ranks(said: dict[str, bool | str], scene: str) -> None:
    """What the scene's name says holds on every rank."""
    assert said[scene] is True, said[scene]


def test_torch_is_not_imported(tmp_path: Path) -> None:
    """In a process without torch every answer is there at once, and torch is still not."""
    code = (
        "import sys; from hydroslurm.coordination import collectives as c; "
        "assert (c.groups(), c.issued_exact(), c.in_flight()) == ({}, {}, 0); "
        "assert c.progress() is None; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60, check=True)


def test_names_that_are_missing_make_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without the registry or the recorder is answered for, not failed with."""

    class Empty:
        pass

    class Group:
        group_name = "0"

        def _get_sequence_number_for_group(self) -> int:
            return 3

    class World:
        def __init__(self) -> None:
            self.pg_group_ranks = {Group(): {0: 0, 1: 1}, Empty(): {0: 0, 1: 1}}

    bare = Empty()
    monkeypatch.setitem(sys.modules, collectives._DISTRIBUTED, bare)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, collectives._NATIVE, Empty())  # type: ignore[arg-type]
    assert collectives.groups() == {}
    assert collectives.in_flight() == 0
    bare._world = World()  # type: ignore[attr-defined]
    assert [group.issued for group in collectives.groups().values()] == [3]
    assert collectives.progress() == collectives.Progress(*collectives.groups(), 3, None)
    assert collectives.in_flight() is None
    assert collectives.issued_exact() is None

"""Who a rank is and where its peers are, from what srun and torchrun set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hydroslurm.coordination import network
from hydroslurm.coordination.network import located, rendezvous_environment, set_master_addr
from hydroslurm.coordination.rendezvous import set_torch_environment
from hydroslurm.coordination.world import COORDINATOR_PORT_TRIES, FIRST_PORT, KEY_ENV, PORTS, World
from hydroslurm.core.rundir import RUN_DIR_ENV
from hydroslurm.errors import CoordinatorLost, UsageError

SRUN = {
    "SLURM_JOB_ID": "31",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NODELIST": "n[3-6]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_SUBMIT_DIR": "/work",
    "SLURM_CLUSTER_NAME": "one",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
BATCH = {name: value for name, value in SRUN.items() if "STEP" not in name}
SINGLE = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_TASKS_PER_NODE"}


def world(given: dict[str, str], **more: str) -> World:
    return World.from_environ({**given, **more})


def ports(world: World, key: bytes | None = None) -> tuple[int, tuple[int, ...]]:
    return world.torch_port(key), world.coordinator_ports(key)


def test_a_process_of_neither_is_alone() -> None:
    """Without variables, and in a batch script without srun, there is one rank."""
    assert World.from_environ({}) == world(BATCH, SLURM_NTASKS="8") == World()


def on_node(tasks: str, node: str) -> dict[str, str]:
    return {**SRUN, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}


@pytest.mark.parametrize(
    ("given", "local_world_size", "host"),
    [
        (SRUN, 2, "n3"),  # rank 0 is on its first node
        ({**SRUN, "MASTER_ADDR": "10.0.0.9"}, 2, "10.0.0.9"),
        (on_node("2(x3),1", "3"), 1, "n3"),
        (on_node("1,3,2(x2)", "1"), 3, "n3"),
        (on_node("1,3,2(x2)", "3"), 2, "n3"),
        # all ranks are on the single node, and need no network
        ({**SINGLE, "SLURM_STEP_NODELIST": "n3", "SLURM_NODEID": "0"}, 7, "127.0.0.1"),
    ],
)
def test_a_task_of_srun(given: dict[str, str], local_world_size: int, host: str) -> None:
    seen = World.from_environ(given)
    assert (seen.rank, seen.world_size, seen.local_rank) == (5, 7, 1)
    assert (seen.local_world_size, seen.host) == (local_world_size, host)


def test_torchruns_variables_win() -> None:
    """Below an srun task torchrun's workers have ranks of their own."""
    seen = world({**SRUN, **TORCHRUN})
    assert (seen.rank, seen.world_size, seen.local_rank, seen.local_world_size) == (3, 4, 1, 2)
    assert seen.host == "n1"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 and WORLD_SIZE=4 contradict"),
        ({**TORCHRUN, "WORLD_SIZE": "many"}, "WORLD_SIZE='many' is not a number"),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, "LOCAL_RANK='-1'"),
        ({**SRUN, "SLURM_PROCID": "7"}, "SLURM_PROCID=7 and SLURM_STEP_NUM_TASKS=7 contradict"),
        (on_node("2(3)", "0"), "is not a list such as"),
    ],
)
def test_contradictions(given: dict[str, str], words: str) -> None:
    """What neither of them sets is refused, with the variable and its value."""
    with pytest.raises(UsageError) as raised:
        World.from_environ(given)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("given", "other"),
    [
        (SRUN, {"SLURM_RESTART_COUNT": "1"}),
        (SRUN, {"SLURM_STEP_ID": "1"}),
        (SRUN, {"SLURM_JOB_ID": "32"}),
        (SRUN, {"SLURM_CLUSTER_NAME": "two"}),
        (SRUN, {"SLURM_SUBMIT_DIR": "/other"}),
        (TORCHRUN, {"MASTER_PORT": "29501"}),
        (TORCHRUN, {"TORCHELASTIC_RESTART_COUNT": "1"}),
        (TORCHRUN, {"TORCHELASTIC_RUN_ID": "other"}),
        ({**SRUN, **TORCHRUN}, {"SLURM_RESTART_COUNT": "1"}),
        (TORCHRUN, {"HYDROSLURM_INCARNATION": "the agent's"}),
    ],
)
def test_another_attempt_has_another_name(given: dict[str, str], other: dict[str, str]) -> None:
    """What starts the ranks anew changes the attempt, and with it the ports; ranks of one attempt
    agree on all of it."""
    one, another = world(given), world(given, **other)
    assert one.incarnation_id != another.incarnation_id
    assert ports(one) != ports(another)
    peers = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    peers |= {"RANK": "0", "LOCAL_RANK": "0"} if "RANK" in given else {}
    peer = world(given, **peers)
    assert (peer.incarnation_id, ports(peer)) == (one.incarnation_id, ports(one))


def test_who_knows_the_key_knows_the_ports() -> None:
    """They follow from it: the same for all who have it, others for everybody else. Torch's and the
    coordinator's do not overlap, and none is one that Linux gives to whoever asks."""
    one, key = world(SRUN), bytes(range(32))
    assert ports(one, key) == ports(world(SRUN), key)
    assert len({ports(one, key), ports(one, bytes(32)), ports(one)}) == 3
    for restart in range(300):
        torch_port, own = ports(world(SRUN, SLURM_RESTART_COUNT=str(restart)))
        assert FIRST_PORT <= torch_port < FIRST_PORT + PORTS <= min(own)
        assert len(set(own)) == COORDINATOR_PORT_TRIES
        assert max(own) < FIRST_PORT + 2 * PORTS < 32768


def test_what_init_process_group_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ranks of srun all six variables are set. They do not make another attempt of this one: the
    process that has them, and one that reads only Slurm's, are ranks of the same."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_")) or name in TORCHRUN:
            monkeypatch.delenv(name)
    # a name that resolves; without the folder Slurm is asked, and there is none
    more = {"SLURM_STEP_NODELIST": "localhost,n[4-6]", KEY_ENV: "ab" * 32}
    for name, value in {**SRUN, **more, RUN_DIR_ENV: str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    seen = set_torch_environment()
    assert {name: os.environ[name] for name in TORCHRUN if name in os.environ} == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(seen.torch_port(bytes.fromhex("ab" * 32))),
    }
    assert World.from_environ(os.environ) == seen


def test_what_is_set_stays() -> None:
    """Torchrun's workers have all of it, and a person may have chosen a port."""
    environ, chosen = dict(TORCHRUN), {**SRUN, "MASTER_PORT": "1234"}
    set_torch_environment(environ)
    set_torch_environment(chosen)
    assert (environ, chosen["MASTER_PORT"]) == (TORCHRUN, "1234")


# --- where the first node is reached whose name nobody can look up

NOWHERE = World(rank=1, world_size=2, host="no-such-node.invalid")


@pytest.fixture
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody to ask, and nothing remembered."""
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))
    network._look_up.cache_clear()
    yield
    network._look_up.cache_clear()


@pytest.mark.usefixtures("no_slurm")
def test_a_name_that_leads_nowhere() -> None:
    """It is an error that says what was seen, and what to set; the first rank listens all the same,
    for others may find it."""
    environ: dict[str, str] = {}
    for ask in (lambda: set_master_addr(NOWHERE, environ), lambda: located(NOWHERE)):
        with pytest.raises(CoordinatorLost) as raised:
            ask()
        for words in ("no-such-node.invalid does not resolve here", "SLURM_CONF", "MASTER_ADDR"):
            assert words in str(raised.value)
    assert environ == {}
    assert located(replace(NOWHERE, rank=0)).host == NOWHERE.host


@pytest.mark.usefixtures("no_slurm")
def test_what_a_person_has_set_is_not_looked_up() -> None:
    """Nor is the node of a process that is alone."""
    environ = {"MASTER_ADDR": "10.0.0.9"}
    assert set_master_addr(NOWHERE, environ) == NOWHERE
    assert set_master_addr(replace(NOWHERE, rank=0, world_size=1), {}).host == NOWHERE.host
    assert environ == {"MASTER_ADDR": "10.0.0.9"}


def test_the_meeting_place() -> None:
    """On one machine gloo is told which interface to take."""
    assert rendezvous_environment("10.0.0.7") == {"MASTER_ADDR": "10.0.0.7"}
    assert rendezvous_environment("127.0.0.1")["GLOO_SOCKET_IFNAME"] == "lo"

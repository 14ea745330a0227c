"""The parts of an agent that need no process: judgement, defaults, states."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from hydroslurm.jobs.agent import rendezvous
from hydroslurm.jobs.agent.node import Interrupted, SignalPipe
from hydroslurm.jobs.agent.rendezvous import (
    Rendezvous,
    RendezvousKeepalive,
    fill_in,
    find_rendezvous,
)
from hydroslurm.jobs.agent.workers import (
    are_leaving,
    failure_status,
    node_status,
    what_is_missing,
)

TERM = -int(signal.SIGTERM)


@pytest.mark.parametrize(
    ("codes", "stop_asked", "others_leave", "waited_for"),
    [
        ((None, None), True, True, False),
        ((0, None), False, True, False),
        ((0, 0), True, False, False),
        ((75, None), False, True, True),
        ((75, None), False, False, False),
        ((75, None), True, False, True),
        ((1, None), True, False, True),
        ((1, None), False, True, False),
        ((TERM, None), False, True, False),
        ((TERM, None), True, True, True),
        ((1, 1), False, True, False),
        ((1, 0), True, True, False),
        ((75, 1), False, True, False),
    ],
)
def test_who_is_waited_for(
    codes: tuple[int | None, ...], stop_asked: bool, others_leave: bool, waited_for: bool
) -> None:
    """Who leaves on purpose is waited for, who fails is not, and after a stop nobody is ended."""
    assert are_leaving(codes, stop_asked=stop_asked, others_leave=others_leave) is waited_for


@pytest.mark.parametrize(
    ("codes", "stop_asked", "status"),
    [
        ((75, 75), True, 75),
        ((75, 143), True, 143),
        ((143, 93, 75), False, 93),
        ((TERM, 75), True, 75),
        ((TERM, TERM), True, 143),
        ((TERM,), False, None),
        ((TERM, 1), True, None),
        ((1, -9), True, None),
        ((0, 0), True, None),
    ],
)
def test_node_status(codes: tuple[int, ...], stop_asked: bool, status: int | None) -> None:
    """One status of many: what binds most, else what torchrun makes of it."""
    assert node_status(codes, stop_asked=stop_asked) == status


@pytest.mark.parametrize(
    ("codes", "stop_asked", "status"),
    [
        ((3,), False, 3),
        ((-9,), False, 137),
        ((1, -9), False, 137),
        ((138, 1), False, 138),
        ((TERM,), False, 143),
        ((TERM, 1), True, 1),
        ((75, 4), False, 4),
        ((0, 75), False, None),
        ((), False, None),
    ],
)
def test_failure_status(codes: tuple[int, ...], stop_asked: bool, status: int | None) -> None:
    """Of workers that failed together the one that says most."""
    assert failure_status(codes, stop_asked=stop_asked) == status


def test_where_a_program_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun's child would find it: a script here, a program on the PATH, a module never."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "train").write_text("#!/bin/sh\n")
    kinds = {"script": (False, False), "program": (True, False), "module": (False, True)}
    found = {
        name: what_is_missing("train", is_program=program, is_module=module)
        for name, (program, module) in kinds.items()
    }
    assert found["script"] is found["module"] is None
    assert "'train' on the PATH" in (found["program"] or (0, ""))[1]
    (tmp_path / "train").chmod(0o755)
    assert what_is_missing("train", is_program=True, is_module=False) is None
    missing = what_is_missing("sub/train", is_program=False, is_module=False)
    assert str(tmp_path / "sub/train") in (missing or (0, ""))[1]


def _step(**values: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "12",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": "n[1-3]",
        "SLURM_NODEID": "1",
        **values,
    }


def test_where_the_tasks_of_a_job_step_meet() -> None:
    """One agent per task, at the first node, elsewhere in each attempt; one alone needs nothing."""
    where = find_rendezvous(_step(), key=None)
    assert where is not None
    assert (where.nnodes, where.run_id, where.rank) == (3, "12.0.0", 1)
    assert where.endpoint.startswith("n1:")
    first = find_rendezvous(_step(SLURM_PROCID="0", SLURM_NODEID="0"), key=None)
    assert first is not None
    assert (first.endpoint, first.rank) == (where.endpoint, 0)
    again = find_rendezvous(_step(SLURM_RESTART_COUNT="1"), key=None)
    assert again is not None
    assert again.endpoint != where.endpoint
    assert again.run_id == "12.0.1"
    assert find_rendezvous(_step(SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1"), key=None) is None
    assert find_rendezvous({}, key=None) is None


def _arguments(**values: object) -> argparse.Namespace:
    given = {"nnodes": "1:1", "rdzv_backend": "static", "rdzv_endpoint": "", "rdzv_conf": ""}
    return argparse.Namespace(**{**given, "rdzv_id": "none", "standalone": False, **values})


@pytest.mark.parametrize(
    "given",
    [
        {"nnodes": "2"},
        {"standalone": True},
        {"rdzv_endpoint": "h:1"},
        {"rdzv_id": "7"},
        {"rdzv_backend": "etcd-v2"},
    ],
)
def test_what_was_said_stays(given: dict[str, object]) -> None:
    """One word of the user's about the rendezvous, and none of it is changed."""
    chosen = _arguments(**given)
    assert not fill_in(chosen, Rendezvous(3, "n1:2", "12.0.0", 0), untouched=_arguments())
    assert chosen == _arguments(**given)


def test_what_was_not_said_is_filled_in() -> None:
    """Without a word the tasks meet in torch's c10d store, which the first of them has."""
    chosen = _arguments()
    assert fill_in(chosen, Rendezvous(3, "n1:2", "12.0.0", 0), untouched=_arguments())
    assert vars(chosen) == {
        "nnodes": "3", "rdzv_backend": "c10d", "rdzv_endpoint": "n1:2", "rdzv_id": "12.0.0",
        "rdzv_conf": "is_host=1", "standalone": False,
    }  # fmt: skip
    chosen = _arguments(rdzv_conf="join_timeout=9")
    assert fill_in(chosen, Rendezvous(3, "n1:2", "12.0.0", 1), untouched=_arguments())
    assert (chosen.nnodes, chosen.rdzv_conf) == ("3", "join_timeout=9,is_host=0")


@pytest.mark.parametrize(("nodes", "backend"), [("1:3", "c10d"), ("3", "c10d"), ("3", "static")])
def test_nodes_alone_say_not_where(nodes: str, backend: str) -> None:
    """How many nodes there may be is the user's; where they meet is filled in."""
    chosen = _arguments(nnodes=nodes, rdzv_backend=backend)
    assert fill_in(chosen, Rendezvous(3, "n1:2", "12.0.0", 1), untouched=_arguments())
    assert (chosen.nnodes, chosen.rdzv_backend) == (nodes, "c10d")
    assert (chosen.rdzv_endpoint, chosen.rdzv_conf) == ("n1:2", "is_host=0")


def test_mailbox() -> None:
    """Signals do not end the process, are told in their order to another thread, and the handlers
    of before come back."""
    before = signal.getsignal(signal.SIGUSR1)
    box = SignalPipe([signal.SIGUSR1, signal.SIGUSR2], stops=[signal.SIGUSR2])
    box.open()
    try:
        for signo in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1):
            os.kill(os.getpid(), signo)
        assert box.wait(10.0) == [signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1]
        assert box.wait(0.0) == []
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        box.open()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert box.wait(10.0) == [signal.SIGUSR1]
        with box.interruptible():
            os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(Interrupted), box.interruptible():
            signal.raise_signal(signal.SIGUSR2)
    finally:
        box.close()
    assert box.wait(10.0) is not None  # what had come before
    assert box.wait(10.0) is None
    assert signal.getsignal(signal.SIGUSR1) is before


class _Holder:
    """What patience needs of torch's state holder."""

    def __init__(self) -> None:
        self.sanitized = self.synced = 0

    def _sanitize(self) -> None:
        self.sanitized += 1

    def sync(self) -> bool | None:
        self.synced += 1
        self._sanitize()
        return True


def _handler(holder: object) -> SimpleNamespace:
    settings = SimpleNamespace(keep_alive_interval=timedelta(seconds=1))
    return SimpleNamespace(settings=settings, _state_holder=holder, num_nodes_waiting=lambda: 2)


def test_silence_after_a_gap_is_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are given up as ever, but not in the time after this process was stopped, and the
    store is not asked between SIGTSTP and SIGCONT."""
    now_s = time.monotonic()
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: now_s)
    holder = _Holder()
    taught = RendezvousKeepalive(_handler(holder), leaving=lambda: False, warn=pytest.fail)
    holder.sync()
    now_s += 1.5
    holder.sync()
    assert (holder.synced, holder.sanitized) == (2, 2)
    taught.suspend(True)
    assert holder.sync() is None
    now_s += 600
    taught.suspend(False)
    holder.sync()
    now_s += 1.0
    holder.sync()
    assert (holder.synced, holder.sanitized) == (4, 2)
    for _ in range(31):
        now_s += 1.0
        holder.sync()
    assert holder.sanitized > 2


def test_an_unknown_rendezvous_is_told_of() -> None:
    """A torch whose rendezvous looks different works as before, and that is said once; one without
    heartbeats needs nothing."""
    said: list[str] = []
    RendezvousKeepalive(_handler(object()), leaving=lambda: False, warn=said.append)
    assert len(said) == 1
    RendezvousKeepalive(_handler(None), leaving=lambda: False, warn=pytest.fail)


def test_a_lost_store_is_borne_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent with the store may leave a moment before ours hears of it; a node that leaves asks
    nobody."""
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    def lost() -> int:
        raise RendezvousConnectionError("gone")

    now_s = time.monotonic()
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: now_s)
    leaving = False
    handler = _handler(None)
    asks: Callable[[], int] = handler.num_nodes_waiting
    assert (
        RendezvousKeepalive(handler, leaving=lambda: leaving, warn=pytest.fail).num_nodes_waiting()
        == asks()
    )
    handler = _handler(None)
    handler.num_nodes_waiting = lost
    taught = RendezvousKeepalive(handler, leaving=lambda: leaving, warn=pytest.fail)
    assert handler.num_nodes_waiting() == 0
    now_s += 3600  # it was suspended, as the other one was
    for _ in range(6):
        assert handler.num_nodes_waiting() == 0
        now_s += 5
    with pytest.raises(RendezvousConnectionError):
        taught.num_nodes_waiting()
    leaving = True
    assert taught.num_nodes_waiting() == 0

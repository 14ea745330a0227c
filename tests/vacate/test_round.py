"""Several ranks vacate together or not at all, whatever goes wrong on one of them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from hydroslurm.coordination.agreements import values_of
from hydroslurm.coordination.authentication import pack
from hydroslurm.coordination.messages import Outbox
from hydroslurm.coordination.state import Agreements
from hydroslurm.errors import AgreementFailed, VacateError
from hydroslurm.vacate.policy import DeviceState
from hydroslurm.vacate.round import Limits, Outcome, VacateRound

WORLD = 3
LIMITS = Limits(lock_s=0.1, state_s=0.1, move_s=0.1, floor_bytes_per_s=1e12, retry_s=0.001)
STEPS = {
    "lock": (DeviceState.RUNNING, DeviceState.LOCKED),
    "checkpoint": (DeviceState.LOCKED, DeviceState.CHECKPOINTED),
    "restore": (DeviceState.CHECKPOINTED, DeviceState.LOCKED),
    "unlock": (DeviceState.LOCKED, DeviceState.RUNNING),
}


class Coordinator:
    """The coordinator's own agreements, between threads. Who dies is gone for all that follows."""

    def __init__(self) -> None:
        self._agreements = Agreements(WORLD)
        self._inbox: dict[tuple[int, str], Mapping[str, Any]] = {}
        self._died: set[int] = set()
        self._changed = threading.Condition()

    def agree(self, rank: int, topic: str, value: Any) -> Mapping[int, Any]:
        message = {
            "topic": topic, "value": pack(value).decode(), "among": None, "collect_at": None
        }  # fmt: skip
        with self._changed:
            self._send(self._agreements.submit(rank, message, died=self._died, left=()))
            assert self._changed.wait_for(lambda: (rank, topic) in self._inbox, timeout=60)
            decision = self._inbox[rank, topic]
        if decision["type"] == "agreement_failed":
            raise AgreementFailed(f"gone: {decision['missing']}")
        return values_of(decision)

    def die(self, rank: int) -> None:
        with self._changed:
            self._died.add(rank)
            self._send(self._agreements.without(rank))

    def _send(self, outbox: Outbox) -> None:
        for rank, message in outbox:
            self._inbox[rank, message["topic"]] = message
        self._changed.notify_all()


class Device:
    """The device of one rank. Every call and every state of all ranks is in one list, in order."""

    def __init__(self, rank: int, log: list[tuple[int, str]], fault: tuple[str, str]) -> None:
        self.rank, self.now = rank, DeviceState.RUNNING
        self._log, (self._call, self._how) = log, fault

    def _step(self, call: str) -> None:
        before, after = STEPS[call]
        assert self.now is before, f"rank {self.rank}: {call} while {self.now}"
        if call == self._call:
            self._call = ""
            if self._how == "die":
                raise SystemExit
            if self._how == "fail":
                self.now = DeviceState.FAILED
            if self._how == "late":  # it has worked, and nobody was told
                self.now = after
            raise VacateError(f"{call}: {self._how}")
        self.now = after
        self._log.append((self.rank, call))

    def device_bytes(self) -> int:
        return 100 + self.rank

    def checkpoint(self, timeout_s: float) -> int:
        self._step("checkpoint")
        return self.device_bytes()

    def lock(self, timeout_s: float) -> None:
        self._step("lock")

    def restore(self, timeout_s: float) -> None:
        self._step("restore")

    def unlock(self, timeout_s: float) -> None:
        self._step("unlock")

    def state(self, timeout_s: float) -> DeviceState:
        return self.now


class Story:
    """All ranks, each in a thread: away, and back where they are away."""

    def __init__(self, rank: int = -1, call: str = "", how: str = "", refusal: str = "") -> None:
        self.log: list[tuple[int, str]] = []
        self.devices = [
            Device(one, self.log, (call, how) if one == rank else ("", "")) for one in range(WORLD)
        ]
        self.away: dict[int, Outcome] = {}
        self.back: dict[int, Outcome] = {}
        self.waits: list[str] = []
        self._coordinator, self._refusal = Coordinator(), {rank: refusal}
        threads = [threading.Thread(target=self._live, args=(one,)) for one in range(WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank waits for ever"

    def _live(self, rank: int) -> None:
        def agree(
            topic: str, value: Any, *, timeout_s: float | None, cancel: threading.Event | None
        ) -> Mapping[int, Any]:
            return self._coordinator.agree(rank, topic, value)

        one = VacateRound(self.devices[rank], topic="vacate/1", agree=agree, limits=LIMITS)
        try:
            self.away[rank] = one.vacate(self._refusal.get(rank, ""))
            if self.away[rank].done:
                self.back[rank] = one.restore(self.waits.append)
        except SystemExit:
            self._coordinator.die(rank)

    def places(self, call: str) -> list[int]:
        return [place for place, (_, one) in enumerate(self.log) if one == call]


def test_all_lock_before_one_checkpoints_and_all_are_back_before_one_unlocks() -> None:
    """The order over all ranks: a peer that is locked can hang another's checkpoint."""
    story = Story()
    assert [story.away[rank] for rank in range(WORLD)] == [
        Outcome(True, 100 + rank, story.away[rank].took_s) for rank in range(WORLD)
    ]
    assert all(one.done for one in story.back.values())
    assert max(story.places("lock")) < min(story.places("checkpoint"))
    assert max(story.places("restore")) < min(story.places("unlock"))
    assert {device.now for device in story.devices} == {DeviceState.RUNNING}


def test_what_is_not_begun() -> None:
    """One refusal is everybody's: a rank without the memory for its copy says so, and nobody's
    device is called. Nor is a checkpoint begun in a pause that is over before the first call."""
    story = Story(rank=1, refusal="no memory")
    assert {one.reason for one in story.away.values()} == {"rank 1: no memory"}
    assert not story.log
    device, over = Device(0, log := [], ("", "")), threading.Event()
    over.set()
    away = VacateRound(device, topic="t", limits=LIMITS, cancel=over).vacate()
    assert not away.done
    assert "ended" in away.reason
    assert log == [(0, "lock"), (0, "unlock")]
    assert device.now is DeviceState.RUNNING


@pytest.mark.parametrize(
    ("call", "how"), [*itertools.product(STEPS, ("refuse", "fail", "late", "die"))]
)
def test_one_rank_errs(call: str, how: str) -> None:
    """Up to the checkpoints, one rank's failure leaves no rank vacated and every one RUNNING; after
    them a rank's failure is its own. Only a FAILED device is lost. When a rank dies the others hear
    of it, wait for nobody, and end RUNNING whatever they had moved."""
    story = Story(rank=1, call=call, how=how)
    for device in story.devices:
        lost = device.rank == 1 and how == "fail"
        if device.rank != 1 or how != "die":
            assert device.now is (DeviceState.FAILED if lost else DeviceState.RUNNING)
            assert (story.back.get(device.rank) or story.away[device.rank]).lost == lost
    if how == "die":
        assert set(story.away) >= {0, 2}
        return
    assert len({one.done for one in story.away.values()}) == 1
    if call in ("lock", "checkpoint"):
        assert not any(one.done for one in story.away.values())
        assert all("rank 1" in one.reason for one in story.away.values())
    else:
        assert all(one.done for one in story.away.values())
        assert all(story.back[rank].done for rank in (0, 2))

"""The other ranks of a run, as it needs them: one that is alone decides alone.

:class:`Together` is the only place of the session that knows what several ranks add: a stop and a
save by the clock are barriers at one safe point, and whatever one rank decides for all (whether the
run may go on, what Slurm said, whether it was requeued) is told to all before anybody acts on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hydroslurm import errors
from hydroslurm.checkpoint.save_round import Peers
from hydroslurm.coordination.client import CoordinatorClient
from hydroslurm.coordination.stop_barrier import StopBarrier
from hydroslurm.errors import AgreementFailed, HydroslurmError, RanksError, UsageError
from hydroslurm.runtime.controller import Controller, StopRequest

CALL_AGAIN_S = 5.0
"""A save that was called for, and not met for so long, is called for again."""
GATHER_LOOK_S = 0.25
STOPPED_GATHER_S = 1.5
"""How long ranks that were told to stop before all were there wait for the rest: there is nothing
to save, and little time to say so."""


NEWS_S = 1.0
"""How long after a failed collective the news of a rank's death is waited for."""


class RankGroup(Protocol):
    """What a run asks of its ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def peers(self) -> Peers | None:
        """For joint checkpoints; None where there is one rank."""

    def gather(self) -> None:
        """Wait until all ranks are there.

        Raises:
            CoordinatorLost: they did not come.
            AgreementFailed: a stop was asked for meanwhile.
        """

    def arrive(self) -> StopRequest | None:
        """The training thread is at a place: the stop that is obeyed here, if any.

        Raises:
            AgreementFailed, CoordinatorLost: a stop is wanted, and the ranks cannot stop at one
                safe point.
        """

    def stop_wanted(self) -> bool:
        """Whether a stop is on its way, obeyed here or later."""

    def takes_save(self) -> bool:
        """Whether a save was called for, for all ranks, that this safe point is the one for."""

    def call_save(self) -> None:
        """Have all ranks save, at a safe point to come."""

    def decide(self, topic: str, decision: Callable[[], Any]) -> Any:
        """What one rank decides for all: the first, or the next when that is gone.

        Args:
            decision: called on one rank; gives plain JSON, or raises an error that all then raise.

        Raises:
            CoordinatorLost, AgreementFailed: it could not be told to all.
        """

    def exchange(self, topic: str, value: Any) -> Mapping[int, Any]:
        """Everybody's value; no rank goes on before all have handed in theirs.

        Raises:
            CoordinatorLost, AgreementFailed: a rank is gone.
        """

    def broken(self) -> RanksError | None:
        """Why the ranks are not together any more, after a collective has failed; None when they
        are. Waits a moment: the failure may be here before the news of a death."""

    def part(self) -> None:
        """This rank has nothing more to do with the others: it is done, or has stopped with
        them."""


class Alone:
    """The only rank."""

    rank = 0
    world_size = 1
    peers = None

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def gather(self) -> None:
        return

    def arrive(self) -> StopRequest | None:
        return self._controller.stop_request

    def stop_wanted(self) -> bool:
        return self._controller.stop_request is not None

    def takes_save(self) -> bool:
        return False

    def call_save(self) -> None:
        raise AssertionError("a rank that is alone saves when it is time to")

    def decide(self, topic: str, decision: Callable[[], Any]) -> Any:  # noqa: ARG002 - nobody asks
        return decision()

    def exchange(self, topic: str, value: Any) -> Mapping[int, Any]:  # noqa: ARG002 - as above
        return {0: value}

    def broken(self) -> None:
        return None

    def part(self) -> None:
        return


class Together:
    """One of several."""

    def __init__(self, controller: Controller, ranks: CoordinatorClient) -> None:
        self._controller = controller
        self._ranks = ranks
        self._save_called_s = -math.inf
        self._save_due = False
        self._topics: dict[str, int] = {}

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        return self._ranks.world_size

    @property
    def peers(self) -> Peers:
        return self._ranks

    def gather(self) -> None:
        while not self._ranks.wait_for_all(timeout_s=GATHER_LOOK_S):
            request = self._controller.stop_request
            if request is not None and _age_s(request) > STOPPED_GATHER_S:
                raise AgreementFailed(
                    f"not all {self.world_size} ranks have come, and {request.message}; nothing "
                    "was trained in this attempt"
                )

    def arrive(self) -> StopRequest | None:
        held = self._ranks.stop_barriers.arrive()
        for barrier in held:
            if barrier.kind == "save":
                self._save_due = True
        stop = next((one for one in held if one.kind == "stop"), None)
        if stop is None:
            # nobody can be met any more; whoever was signalled must not train on until it is killed
            if self._ranks.lost is not None and self._controller.stop_request is not None:
                raise self._ranks.lost
            return None
        self._ranks.stopping = True
        return self._controller.stop_request or self._heard_of(stop)

    def stop_wanted(self) -> bool:
        return self._controller.stop_request is not None or self._ranks.stop_barriers.is_called

    def takes_save(self) -> bool:
        due, self._save_due = self._save_due, False
        if due:
            self._save_called_s = -math.inf
        return due

    def call_save(self) -> None:
        now_s = time.monotonic()
        if now_s - self._save_called_s > CALL_AGAIN_S:  # else it is on its way
            self._save_called_s = now_s
            self._ranks.call("save")

    def decide(self, topic: str, decision: Callable[[], Any]) -> Any:
        self._require_all()
        topic = self._numbered(topic)
        circle: Sequence[int] = range(self.world_size)
        mine: dict[str, Any] | None = None
        for attempt in range(self.world_size):
            first = circle[0]
            if self.rank == first and mine is None:
                mine = _tell_of(decision)
            try:
                told = self._ranks.agree(f"{topic}/{attempt}", mine, among=circle)
            except AgreementFailed as failure:
                if not failure.missing:
                    raise
                circle = [rank for rank in circle if rank not in failure.missing]
                continue  # the first that is left decides, or tells again what it has decided
            return _hear(told[first])
        raise AssertionError("this rank is one of those that are left")

    def exchange(self, topic: str, value: Any) -> Mapping[int, Any]:
        self._require_all()
        return self._ranks.agree(self._numbered(topic), value)

    def broken(self) -> RanksError | None:
        end_s = time.monotonic() + NEWS_S
        while time.monotonic() < end_s:
            died = tuple(rank for rank, has_died in self._ranks.gone.items() if has_died)
            if died:
                return AgreementFailed(f"gone: rank {', '.join(map(str, died))}", missing=died)
            if self._ranks.lost is not None:
                return self._ranks.lost
            time.sleep(0.02)
        return None

    def part(self) -> None:
        self._ranks.done = True

    def _require_all(self) -> None:
        """A rank that leaves before all have come must not wait for those that may never come."""
        if not self._ranks.have_joined:
            raise AgreementFailed(f"not all {self.world_size} ranks have come")

    def _numbered(self, topic: str) -> str:
        """A topic is used once; all ranks come to the same ones in the same order."""
        number = self._topics[topic] = self._topics.get(topic, 0) + 1
        return f"run/{topic}/{number}"

    def _heard_of(self, barrier: StopBarrier) -> StopRequest:
        """The barrier was faster than the thread that writes the request down."""
        return StopRequest(
            signal=barrier.message or None,
            sender_pid=0,
            mono_ns=time.monotonic_ns(),
            epoch_ns=time.time_ns(),
            of_rank=None if barrier.of_rank == self.rank else barrier.of_rank,
        )


def rank_group_of(controller: Controller) -> RankGroup:
    """The rank group of this process's controller."""
    if controller.ranks is None:
        return Alone(controller)
    return Together(controller, controller.ranks)


def _age_s(request: StopRequest) -> float:
    return (time.monotonic_ns() - request.mono_ns) / 1e9


def _tell_of(decision: Callable[[], Any]) -> dict[str, Any]:
    """What came of it, as all will hear it. What is not ours to explain ends this rank alone."""
    try:
        return {"value": decision()}
    except RanksError:
        raise
    except (HydroslurmError, UsageError) as error:
        return {"error": type(error).__name__, "message": str(error)}


def _hear(told: Any) -> Any:
    if isinstance(told, dict) and "error" in told:
        raise _error(str(told["error"]), str(told.get("message")))
    if not (isinstance(told, dict) and "value" in told):
        raise AgreementFailed(
            f"the rank that decides for all says {told!r:.80}, which is no decision; do all ranks "
            "run the same release?"
        )
    return told["value"]


def _error(name: str, message: str) -> Exception:
    kind = getattr(errors, name, HydroslurmError)
    is_ours = isinstance(kind, type) and issubclass(kind, (HydroslurmError, UsageError))
    return kind(message) if is_ours else HydroslurmError(message)

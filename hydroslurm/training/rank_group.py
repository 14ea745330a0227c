"""The ranks of a run, as one of them sees them.

Nothing else in this package knows what several ranks add: a stop and a save by the clock are
barriers at one safe point, and whatever one rank decides for all (whether the run may continue,
what Slurm said, whether it was requeued) reaches all ranks before any of them acts on it.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydroslurm import errors
from hydroslurm.checkpoint.peers import SOLO, Peers
from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.errors import AgreementFailed, HydroslurmError, RanksError, UsageError
from hydroslurm.runtime.controller import Controller, StopRequest

LOGGER = logging.getLogger("hydroslurm")
CALL_AGAIN_S = 5.0
"""A save that was called for is called for again when no safe point has met it for so long."""
GATHER_LOOK_S = 0.25
STOPPED_GATHER_S = 1.5
"""How long ranks that were told to stop before all had joined wait for the rest: there is nothing
to save, and little time."""
NEWS_S = 1.0
"""How long after a failed collective the news of a rank's death is waited for."""


def notice(text: str) -> None:
    """Log one line of normal progress, at level INFO."""
    _log(logging.INFO, text)


def warning(text: str) -> None:
    """Log one line that somebody has to see: it shows after ``logging.basicConfig()``, too."""
    _log(logging.WARNING, text)


def _log(level: int, text: str) -> None:
    """A program that has set up logging gets it there. Without any handler Python would drop
    everything below WARNING, and a job's log must say where the run resumed from, so one of our own
    on stderr takes its place.
    """
    LOGGER.disabled = False  # dictConfig() disables the loggers that it does not name
    if not LOGGER.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("hydroslurm: %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.setLevel(logging.INFO)
    LOGGER.log(level, text)


class RankGroup:
    """All ranks of a run. A world of one decides alone: no process, no socket, no thread.

    Attributes:
        rank, world_size: of this process.
        peers: what a joint checkpoint needs of the ranks.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._client = controller.ranks
        self.peers: Peers = SOLO if self._client is None else self._client
        self.rank = self.peers.rank
        self.world_size = self.peers.world_size
        self._save_called_s = -math.inf
        self._save_due = False
        self._topics: dict[str, int] = {}

    def gather(self) -> None:
        """Wait until all ranks have joined.

        Raises:
            CoordinatorLost: they did not come.
            AgreementFailed: a stop was asked for meanwhile.
        """
        while self._client is not None and not self._client.wait_for_all(timeout_s=GATHER_LOOK_S):
            request = self._controller.stop_request
            if request and time.monotonic() - request.mono_ns / 1e9 > STOPPED_GATHER_S:
                raise AgreementFailed(
                    f"not all {self.world_size} ranks have come, and {request.message}; nothing "
                    "was trained in this attempt"
                )

    def arrive(self) -> StopRequest | None:
        """The training thread is at a safe point: the stop that is obeyed here, if any.

        Raises:
            AgreementFailed, CoordinatorLost: a stop is wanted, and the ranks cannot stop at one
                safe point.
        """
        client = self._client
        if client is None:
            return self._controller.stop_request
        held = client.stop_barriers.arrive()
        if any(barrier.kind == "save" for barrier in held):
            self._save_due = True
        stop = next((one for one in held if one.kind == "stop"), None)
        if stop is None:
            # nobody can be met any more; whoever was signalled must not train on until it is killed
            if client.lost is not None and self._controller.stop_request is not None:
                raise client.lost
            return None
        client.stopping = True
        return self._controller.stop_request

    def stop_wanted(self) -> bool:
        """Whether a stop is on its way, obeyed here or later."""
        is_called = self._client is not None and self._client.stop_barriers.is_called
        return is_called or self._controller.stop_request is not None

    def takes_save(self) -> bool:
        """Whether all ranks save at this safe point, because :meth:`call_save` was called."""
        due, self._save_due = self._save_due, False
        if due:
            self._save_called_s = -math.inf
        return due

    def call_save(self) -> None:
        """Have all ranks save, at a safe point to come. For several ranks: one that is alone saves
        when it is time to."""
        assert self._client is not None
        now_s = time.monotonic()
        if now_s - self._save_called_s > CALL_AGAIN_S:  # else it is on its way
            self._save_called_s = now_s
            self._client.call("save")

    def decide(self, topic: str, decision: Callable[[], Any]) -> Any:
        """What one rank decides for all: the first, or the next when that is gone.

        Args:
            decision: called on one rank; gives plain JSON, or raises an error that all then raise.

        Raises:
            CoordinatorLost, AgreementFailed: it could not be told to all.
        """
        if self._client is None:
            return decision()
        self._require_all()
        topic = self._numbered(topic)
        among: Sequence[int] = range(self.world_size)
        mine: dict[str, Any] | None = None
        for attempt in range(self.world_size):
            first = among[0]
            if self.rank == first and mine is None:
                mine = _outcome_of(decision)
            try:
                outcomes = self._client.agree(f"{topic}/{attempt}", mine, among=among)
            except AgreementFailed as failure:
                if not failure.missing:
                    raise
                among = [rank for rank in among if rank not in failure.missing]
                continue  # the first that is left decides, or repeats what it has decided
            return _value_of(outcomes[first])
        raise AssertionError("this rank is one of those that are left")

    def exchange(self, topic: str, value: Any) -> Mapping[int, Any]:
        """Everybody's value; no rank goes on before all have handed in theirs.

        Raises:
            CoordinatorLost, AgreementFailed: a rank is gone.
        """
        if self._client is None:
            return {self.rank: value}
        self._require_all()
        return self._client.agree(self._numbered(topic), value)

    def broken(self) -> RanksError | None:
        """Why the ranks are not together any more, after a collective has failed; None when they
        are. Waits a moment: the failure may be here before the news of a death."""
        client = self._client
        clock = AwakeClock()
        end_s = clock.now_s() + NEWS_S
        while client is not None and clock.now_s() < end_s:
            died = tuple(rank for rank, has_died in client.gone.items() if has_died)
            if died:
                return AgreementFailed(f"gone: rank {', '.join(map(str, died))}", missing=died)
            if client.lost is not None:
                return client.lost
            time.sleep(0.02)
        return None

    def log(self, *messages: object, log: Callable[[str], None] = warning) -> None:
        """One rank speaks for all."""
        for message in messages if self.rank == 0 else ():
            log(str(message))

    def part(self) -> None:
        """This rank has nothing more to do with the others: it is done, or has stopped with
        them."""
        if self._client is not None:
            self._client.done = True

    def _require_all(self) -> None:
        """A rank that leaves before all have joined must not wait for those that may never come."""
        assert self._client is not None
        if not self._client.have_joined:
            raise AgreementFailed(f"not all {self.world_size} ranks have come")

    def _numbered(self, topic: str) -> str:
        """A topic is used once; all ranks come to the same ones in the same order."""
        number = self._topics[topic] = self._topics.get(topic, 0) + 1
        return f"run/{topic}/{number}"


def _outcome_of(decision: Callable[[], Any]) -> dict[str, Any]:
    """A decision as all ranks get it. An error that is not ours to explain ends this rank alone."""
    try:
        return {"value": decision()}
    except RanksError:
        raise
    except (HydroslurmError, UsageError) as error:
        return {"error": type(error).__name__, "message": str(error)}


def _value_of(outcome: Any) -> Any:
    if isinstance(outcome, dict) and "error" in outcome:
        raise _error(str(outcome["error"]), str(outcome.get("message")))
    if not (isinstance(outcome, dict) and "value" in outcome):
        raise AgreementFailed(
            f"the rank that decides for all says {outcome!r:.80}, which is no decision; do all "
            "ranks run the same release?"
        )
    return outcome["value"]


def _error(name: str, message: str) -> Exception:
    kind = getattr(errors, name, HydroslurmError)
    is_ours = isinstance(kind, type) and issubclass(kind, (HydroslurmError, UsageError))
    return kind(message) if is_ours else HydroslurmError(message)

"""Stop barriers: one safe point at which all ranks stop, or save.

Each rank counts its safe points, and its checks for a stop between them. Ranks that run the same
program pass the same ones in the same order, also inside an evaluation full of collectives, where
no step ends.

When a barrier is called, each rank proposes the next safe point that it will reach; the maximum
wins. The proposal is made by the thread that receives the call, not by the training loop, which
exchanges nothing. A rank that reaches the safe point it proposed waits there until the common one
is known: milliseconds, because all ranks answer at once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from hydroslurm.errors import AgreementFailed, RanksError


@dataclass
class StopBarrier:
    """A barrier that was called.

    Attributes:
        kind: ``stop`` or ``save``.
        of_rank: the rank that called it.
        proposal: the safe point that this rank has proposed.
        message: what the caller says, such as the signal that it received.
        safe_point_index: the common safe point; None until all ranks have proposed.
        is_cancelled: it will not be held; no error.
    """

    number: int
    kind: str
    of_rank: int
    proposal: int
    message: str = ""
    safe_point_index: int | None = None
    failure: RanksError | None = None
    is_cancelled: bool = field(default=False)

    @property
    def is_open(self) -> bool:
        return self.safe_point_index is None and self.failure is None and not self.is_cancelled


class StopBarriers:
    """This rank's safe points, and the barriers that were called.

    :meth:`arrive` belongs to the training thread, everything else to the coordinator's channel.

    Attributes:
        safe_point_index: how many safe points and checks this rank has reached.
    """

    def __init__(self) -> None:
        self.safe_point_index = 0
        self._called: list[StopBarrier] = []
        self._changed = threading.Condition()

    def arrive(self) -> tuple[StopBarrier, ...]:
        """The training thread has reached a safe point: return the barriers to be held here.

        Costs an addition and a look at an empty list as long as none was called. May wait until
        the common safe point is known.

        Raises:
            AgreementFailed: a rank is gone, so the ranks cannot stop at one safe point.
            CoordinatorLost: nothing connects the ranks any more.
        """
        # The order matters. A caller appends to the list first and reads the index then, so either
        # this thread sees the call, or the proposal lies beyond this safe point.
        self.safe_point_index += 1
        if not self._called:
            return ()
        return self._hold_due()

    def _hold_due(self) -> tuple[StopBarrier, ...]:
        here = self.safe_point_index
        with self._changed:
            self._changed.wait_for(lambda: not any(self._waits_for(b) for b in self._called))
            due = [
                b
                for b in self._called
                if b.safe_point_index is not None and b.safe_point_index <= here
            ]
            failed = [b for b in self._called if b.failure is not None]
            self._called = [
                b for b in self._called if not b.is_cancelled and b not in due and b not in failed
            ]
        for barrier in failed:
            if barrier.kind == "stop":
                assert barrier.failure is not None
                raise barrier.failure
        return tuple(due)

    def _waits_for(self, barrier: StopBarrier) -> bool:
        return barrier.is_open and barrier.proposal <= self.safe_point_index

    @property
    def is_called(self) -> bool:
        """Whether any barrier was called and not yet held."""
        return bool(self._called)

    def call(self, number: int, kind: str, *, of_rank: int, message: str) -> int:
        """Note a barrier that was called; return this rank's proposal."""
        with self._changed:
            barrier = StopBarrier(number, kind, of_rank, proposal=1 << 62, message=message)
            self._called = [*self._called, barrier]
            barrier.proposal = self.safe_point_index + 1
            self._changed.notify_all()
            return barrier.proposal

    def decide(self, number: int, safe_point_index: int) -> StopBarrier | None:
        """Set the common safe point; return the barrier, None if it was not called here."""
        with self._changed:
            found = next((one for one in self._called if one.number == number), None)
            if found is not None:
                found.safe_point_index = safe_point_index
            self._changed.notify_all()
            return found

    def fail(self, number: int, *, missing: tuple[int, ...], finished: bool) -> None:
        """Give a barrier up because ranks are gone. ``finished``: they have trained to the end, as
        this rank will."""
        ranks = ", ".join(map(str, missing))
        gone = f"ranks {ranks} are gone" if len(missing) > 1 else f"rank {ranks} is gone"
        message = f"the ranks cannot stop at one step: {gone}"
        with self._changed:
            for barrier in self._called:
                if barrier.number == number and (finished or barrier.kind != "stop"):
                    barrier.is_cancelled = True
                elif barrier.number == number:
                    barrier.failure = AgreementFailed(message, missing=missing)
            self._changed.notify_all()

    def forget(self) -> None:
        """Drop every barrier: the coordinator that knew of them is gone, and whatever is still
        wanted is called again at the next one."""
        with self._changed:
            self._called = []
            self._changed.notify_all()

    def lose(self, error: RanksError) -> None:
        """Fail every undecided barrier: nothing connects the ranks any more."""
        with self._changed:
            for barrier in self._called:
                if barrier.is_open:
                    barrier.failure = error
            self._changed.notify_all()

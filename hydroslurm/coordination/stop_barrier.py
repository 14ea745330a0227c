"""Meetings: one place in the training at which all ranks stop, or save.

A *place* is a safe point or a check for a stop, counted. Ranks that run the same program come to
the same places in the same order, also within an evaluation full of collectives, where no step
ends.

When a meeting is wanted each rank promises the next place that it will reach, from the thread that
hears of it, and not from the training loop: nothing is asked or exchanged there. The largest
promise is the common place. A rank that comes to the place that it promised waits until it is
known, which is milliseconds, for all answer at once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from hydroslurm.errors import AgreementFailed, RanksError


@dataclass
class StopBarrier:
    """One that was called. ``place``: the common one, None while it is not known."""

    number: int
    kind: str
    of_rank: int
    promise: int
    words: str = ""
    place: int | None = None
    failure: RanksError | None = None
    off: bool = field(default=False)

    @property
    def is_open(self) -> bool:
        return self.place is None and self.failure is None and not self.off


class Meetings:
    """The places of this rank, and the meetings that were called.

    :meth:`arrive` belongs to the training thread, the rest to the one that hears the hub.

    Attributes:
        place: how many safe points and checks were reached.
    """

    def __init__(self) -> None:
        self.place = 0
        self._called: list[StopBarrier] = []
        self._changed = threading.Condition()

    def arrive(self) -> tuple[StopBarrier, ...]:
        """The training thread is at a place: which meetings are to be held here?

        Costs an addition and a look at an empty list while none was called. May wait until the
        common place is known.

        Raises:
            AgreementFailed: a rank is gone, so that a stop at one place cannot be had.
            HubLost: nothing connects the ranks any more.
        """
        # the order matters: whoever calls a meeting appends to the list first and reads the place
        # then, so that either this thread sees the call, or the promise lies behind this place
        self.place += 1
        if not self._called:
            return ()
        return self._meet()

    def _meet(self) -> tuple[StopBarrier, ...]:
        with self._changed:
            self._changed.wait_for(lambda: not any(self._waits_for(m) for m in self._called))
            here = [m for m in self._called if m.place is not None and m.place <= self.place]
            failed = [m for m in self._called if m.failure is not None]
            self._called = [
                m for m in self._called if not m.off and m not in here and m not in failed
            ]
        for one in failed:
            if one.kind == "stop":
                assert one.failure is not None
                raise one.failure
        return tuple(here)

    def _waits_for(self, meeting: StopBarrier) -> bool:
        return meeting.is_open and meeting.promise <= self.place

    @property
    def is_called(self) -> bool:
        """Whether any meeting was called and not yet held."""
        return bool(self._called)

    def call(self, number: int, kind: str, *, of_rank: int, words: str) -> int:
        """A meeting is called; returns the place that is promised."""
        with self._changed:
            meeting = StopBarrier(number, kind, of_rank, promise=1 << 62, words=words)
            self._called = [*self._called, meeting]
            meeting.promise = self.place + 1
            self._changed.notify_all()
            return meeting.promise

    def decide(self, number: int, place: int) -> StopBarrier | None:
        """The common place is known; returns the meeting, None when it was not called here."""
        with self._changed:
            found = next((one for one in self._called if one.number == number), None)
            if found is not None:
                found.place = place
            self._changed.notify_all()
            return found

    def fail(self, number: int, *, missing: tuple[int, ...], finished: bool) -> None:
        """It will not come about: ranks are gone. ``finished``: because they are done, as this one
        will be."""
        with self._changed:
            for meeting in self._called:
                if meeting.number == number:
                    _fail(meeting, missing, finished=finished)
            self._changed.notify_all()

    def forget(self) -> None:
        """The hub that knew of them is gone, and another one comes: what is still wanted is called
        anew there."""
        with self._changed:
            self._called = []
            self._changed.notify_all()

    def lose(self, error: RanksError) -> None:
        """Nothing connects the ranks any more: meetings that are not decided fail."""
        with self._changed:
            for meeting in self._called:
                if meeting.is_open:
                    meeting.failure = error
            self._changed.notify_all()


def _fail(meeting: StopBarrier, missing: tuple[int, ...], *, finished: bool) -> None:
    if finished or meeting.kind != "stop":
        meeting.off = True
        return
    ranks = ", ".join(map(str, missing))
    plural = "s" if len(missing) > 1 else ""
    gone = "are" if len(missing) > 1 else "is"
    meeting.failure = AgreementFailed(
        f"the ranks cannot stop at one step: rank{plural} {ranks} {gone} gone", missing=missing
    )

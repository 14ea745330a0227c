"""One save before a deadline: carries out what ``deadline`` chose."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import asdict, dataclass, replace
from types import NoneType

from hydroslurm.checkpoint.async_save import AsyncSave, AsyncSaves
from hydroslurm.checkpoint.deadline import Choice, InFlight, Situation, choose
from hydroslurm.checkpoint.outcome import Saved, SaveEventKind
from hydroslurm.checkpoint.save_round import SaveRound, checked
from hydroslurm.checkpoint.state_writer import SaveRequest, StateWriter
from hydroslurm.checkpoint.write_plan import WritePlan
from hydroslurm.errors import SaveFailed, UnsavableState

GIVEN_UP_S = 1.0
"""The longest wait for a save that was given up before the next one begins beside it. It ends
between two writes; a hanging disk or a long fsync holds it up."""


@dataclass(frozen=True)
class DeadlineSave:
    """The save of one stop.

    The calling thread waits; a background thread writes, so that this one returns at the deadline
    even if the disk hangs, while the write goes on. A save that is killed later does no harm: a
    checkpoint is committed as a whole or not at all.

    What is written is the state itself: the training is over, and a copy beside the one that a save
    under way may still be reading would be one more than was reserved.
    """

    writer: StateWriter
    saves: AsyncSaves
    save_round: SaveRound
    request: SaveRequest
    deadline_mono_s: float

    def carry_out(self, plan: WritePlan) -> Saved:
        """Do what is chosen by what all ranks know now, until the deadline. Whatever is still
        written then reads the state itself.

        Raises:
            UnsavableState: a rank cannot save its state.
        """
        flight = self.saves.current()
        here = Situation(
            step=self.request.step,
            left_s=self._left_s(),
            save_s=self.writer.expect_s(self.request.state_bytes),
            in_flight=None if flight is None else flight.status(self.request.state),
            committed_step=self.writer.durable_step(),
            is_committed=self._is_durable(),
        )
        try:
            choice = choose(_of_all_ranks(here, self.save_round))
        except UnsavableState:
            self.saves.wait(self._left_s())
            raise
        except SaveFailed as error:
            self.writer.tell(SaveEventKind.FAILED, self.request, reason=str(error))
            self.saves.wait(self._left_s())
            return self._saved(None, None, failure=error)
        self.writer.tell(SaveEventKind.STARTED, self.request, reason=choice.reason)
        if choice.is_committed:
            return self._saved(choice, None)
        before = self._make_way(choice)
        done = self._is_durable() or (
            before is not None and before.request.state == self.request.state
        )
        try:
            answers = self.save_round.settle("done", {"done": done}, left_s=self._left_s()).items()
            if all(checked(one, rank=rank, done=bool)["done"] for rank, one in answers):
                return self._saved(choice, before)
        except SaveFailed as error:
            return self._saved(choice, before, failure=error)
        last = self._launch(plan, before)
        last.see_through(self._left_s())
        return self._saved(choice, last)

    def _make_way(self, choice: Choice) -> AsyncSave | None:
        """Wait for the save in flight or give it up; it, if the next save must wait for it."""
        flight = self.saves.current()
        ended = flight is None or flight.wait(choice.wait_s)
        if not choice.give_up:
            return None if ended else flight
        self.saves.give_up()  # it may have failed because another rank gave it up first
        if flight is not None:
            flight.wait(min(GIVEN_UP_S, self._left_s() / 10))
        return None

    def _launch(self, plan: WritePlan, before: AsyncSave | None) -> AsyncSave:
        """Write, after ``before``."""

        def work(cancel: threading.Event) -> None:
            if before is not None:
                before.wait()
            self.writer.write(plan, self.request, cancel=cancel)

        expected_s = self.writer.expect_s(self.request.state_bytes)
        return self.saves.launch(work, self.request, expected_s=expected_s)

    def _saved(
        self, choice: Choice | None, last: AsyncSave | None, *, failure: BaseException | None = None
    ) -> Saved:
        """The outcome; it reports a failure of the last save, so that ``poll`` does not."""
        if last is not None and not last.running and last.failure is not None:
            failure = failure or last.failure
            self.saves.forget(last)
        is_writing = last is not None and last.running
        step, newest, is_committed = self.request.step, self.writer.newest, self._is_durable()
        came = f"step {step} is committed"
        if not is_committed:
            why = (
                "the save is still under way" if failure is None else f"the save failed ({failure})"
            )
            came = f"step {step} is not committed: {why}"
            if newest is not None and newest.step == step:
                came += f"; what is kept is an earlier save of this step ({newest.path})"
        return Saved(
            step=step,
            is_committed=is_committed,
            checkpoint=newest,
            steps_at_risk=step - (0 if newest is None else newest.step),
            reason=came if choice is None else f"{came}; {choice.reason}",
            still_writing=is_writing,
        )

    def _is_durable(self) -> bool:
        return self.writer.is_durable(self.request.state)

    def _left_s(self) -> float:
        return max(0.0, self.deadline_mono_s - time.monotonic())


def _of_all_ranks(here: Situation, save_round: SaveRound) -> Situation:
    """The least time, the slowest disk, any save in flight, and what all ranks have committed.

    Raises:
        SaveFailed, UnsavableState: on all ranks; one cannot take part or is gone.
    """
    if save_round.is_solo:
        return here
    # JSON has no infinity
    mine = {**asdict(here), "left_s": None if math.isinf(here.left_s) else here.left_s}
    number = (int, float)
    answers = {
        rank: checked(
            answer,
            rank=rank,
            left_s=(*number, NoneType),
            save_s=number,
            in_flight=(dict, NoneType),
            committed_step=(int, NoneType),
            is_committed=bool,
        )
        for rank, answer in save_round.settle("situation", mine, left_s=here.left_s).items()
    }
    flights = [
        checked(one["in_flight"], rank=rank, step=int, remaining_s=number, is_this=bool)
        for rank, one in answers.items()
        if one["in_flight"] is not None
    ]
    left_s = [one["left_s"] for one in answers.values() if one["left_s"] is not None]
    steps = [one["committed_step"] for one in answers.values()]
    flight = InFlight(
        max((one["step"] for one in flights), default=0),
        max((one["remaining_s"] for one in flights), default=0.0),
        is_this=all(one["is_this"] for one in flights),
    )
    return replace(
        here,
        left_s=min(left_s, default=math.inf),
        save_s=max(one["save_s"] for one in answers.values()),
        in_flight=flight if flights else None,
        committed_step=None if None in steps else min(steps),
        is_committed=all(one["is_committed"] for one in answers.values()),
    )

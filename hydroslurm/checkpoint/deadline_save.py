"""One save before a deadline: carries out what ``deadline`` chose."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from types import NoneType
from typing import Any

from hydroslurm.checkpoint.async_save import AsyncSave, AsyncSaves
from hydroslurm.checkpoint.deadline import Action, Before, Choice, InFlight, Situation, choose
from hydroslurm.checkpoint.outcome import Saved
from hydroslurm.checkpoint.save_round import SaveRound, checked
from hydroslurm.checkpoint.state_writer import SaveRequest, StateWriter
from hydroslurm.checkpoint.write_plan import WritePlan
from hydroslurm.errors import SaveFailed

GIVEN_UP_S = 1.0
"""The longest wait for a save that was given up before the next one begins beside it. It ends
between two writes; a hanging disk or a long fsync holds it up."""


class DeadlineSave:
    """The save of one stop.

    The calling thread waits; a background thread writes, so that this one returns at the deadline
    even if the disk hangs, while the write goes on. A save that is killed later does no harm: a
    checkpoint is committed as a whole or not at all.

    What is written is the state itself: the training is over, and a copy beside the one that a save
    under way may still be reading would be one more than was reserved.
    """

    def __init__(
        self,
        writer: StateWriter,
        saves: AsyncSaves,
        *,
        save_round: SaveRound,
        request: SaveRequest,
        deadline_mono_s: float,
    ) -> None:
        """
        Args:
            save_round: the agreements of the ranks.
        """
        self._writer = writer
        self._saves = saves
        self._round = save_round
        self._request = request
        self._deadline_s = deadline_mono_s

    def choose(self) -> Choice:
        """What to do, given what all ranks know now.

        Raises:
            SaveFailed: the ranks could not agree. UnsavableState: one cannot save its state.
        """
        flight = self._saves.current()
        here = Situation(
            step=self._request.step,
            left_s=self._left_s(),
            save_s=self._writer.expect_s(self._request.state_bytes),
            in_flight=None if flight is None else flight.status(self._request.state),
            committed_step=self._writer.durable_step(),
            is_committed=self._is_durable(),
        )
        return choose(_of_all_ranks(here, self._round))

    def failed(self, failure: SaveFailed) -> Saved:
        """The outcome if the ranks could not agree on what to do."""
        self._saves.wait(self._left_s())
        return self._saved(None, None, failure=failure)

    def carry_out(self, choice: Choice, plan: WritePlan) -> Saved:
        """Do it, until the deadline. Whatever is still written then reads the state itself."""
        if choice.action is Action.NOTHING:
            return self._saved(choice, None)
        before = self._make_way(choice)
        done = self._is_durable() or (before is not None and before.state == self._request.state)
        try:
            answers = self._round.settle("done", {"done": done}, left_s=self._left_s()).items()
            if all(checked(one, rank=rank, done=bool)["done"] for rank, one in answers):
                return self._saved(choice, before)
        except SaveFailed as error:
            return self._saved(choice, before, failure=error)
        last = self._launch(plan, before)
        last.see_through(self._left_s())
        return self._saved(choice, last)

    def _make_way(self, choice: Choice) -> AsyncSave | None:
        """Wait for the save in flight or give it up; it, if the next save must wait for it."""
        flight = self._saves.current()
        if choice.before is Before.ABANDON:
            self._saves.give_up()
        if flight is None or choice.before is Before.NONE:
            return None
        if choice.before is Before.WAIT and flight.wait(choice.patience_s):
            return None
        if choice.before is Before.WAIT and not choice.give_up:
            return flight
        flight.give_up()
        flight.wait(min(GIVEN_UP_S, self._left_s() / 10))
        return None

    def _launch(self, plan: WritePlan, before: AsyncSave | None) -> AsyncSave:
        """Write, after ``before``."""

        def work(cancel: threading.Event) -> None:
            if before is not None:
                before.wait()
            self._writer.write(plan, self._request, cancel=cancel)

        return self._saves.launch(
            work,
            step=self._request.step,
            state=self._request.state,
            expected_s=self._writer.expect_s(self._request.state_bytes),
        )

    def _saved(
        self, choice: Choice | None, last: AsyncSave | None, *, failure: BaseException | None = None
    ) -> Saved:
        """The outcome; it reports a failure of the last save, so that ``poll`` does not."""
        if last is not None and not last.running and last.failure is not None:
            failure = failure or last.failure
            self._saves.forget(last)
        is_writing = last is not None and last.running
        step, newest, is_committed = self._request.step, self._writer.newest, self._is_durable()
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
            choice=None if choice is None else choice.action,
            still_writing=is_writing,
        )

    def _is_durable(self) -> bool:
        return self._writer.is_durable(self._request.state)

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())


def _of_all_ranks(here: Situation, save_round: SaveRound) -> Situation:
    """The combined situation of all ranks.

    Raises:
        SaveFailed, UnsavableState: on all ranks; one cannot take part or is gone.
    """
    if save_round.is_solo:
        return here
    answers = save_round.settle("situation", _to_json(here), left_s=here.left_s)
    return _together(here, [_situation_of(rank, one) for rank, one in answers.items()])


def _to_json(now: Situation) -> dict[str, Any]:
    flight = now.in_flight
    return {
        "left_s": None if math.isinf(now.left_s) else now.left_s,
        "save_s": now.save_s,
        "in_flight": None
        if flight is None
        else [flight.step, flight.remaining_s, int(flight.is_this)],
        "committed_step": now.committed_step,
        "is_committed": now.is_committed,
    }


def _situation_of(rank: int, answer: Any) -> dict[str, Any]:
    number = (int, float)
    told = checked(
        answer,
        rank=rank,
        left_s=(*number, NoneType),
        save_s=number,
        in_flight=(list, NoneType),
        committed_step=(int, NoneType),
        is_committed=bool,
    )
    flight = told["in_flight"]
    if flight is not None and [type(one) in number for one in flight] != [True] * 3:
        raise SaveFailed(f"rank {rank} speaks of a save in flight as {flight!r:.80}")
    return told


def _together(now: Situation, told: list[dict[str, Any]]) -> Situation:
    """The least time, the slowest disk, any save in flight, and what all ranks have committed."""
    left_s = [one["left_s"] for one in told if one["left_s"] is not None]
    flights = [one["in_flight"] for one in told if one["in_flight"] is not None]
    steps = [one["committed_step"] for one in told]
    return replace(
        now,
        left_s=min(left_s, default=math.inf),
        save_s=max(one["save_s"] for one in told),
        in_flight=InFlight(
            max(step for step, _, _ in flights),
            max(rest for _, rest, _ in flights),
            is_this=all(is_this for _, _, is_this in flights),
        )
        if flights
        else None,
        committed_step=None if None in steps else min(steps),
        is_committed=all(one["is_committed"] for one in told),
    )

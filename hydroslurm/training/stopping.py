"""Obeying a stop, at the place where this rank, or all ranks together, were told to.

What follows has to be the same on all ranks, and fit into what is left of the shortest grace: is
there time to ask Slurm first, what can still be saved, is the job requeued. So each question is
answered once, for all, before anybody acts on the answer; and nobody ends before the job is
requeued, because srun kills the rest of the ranks when the first one leaves with a status other
than 0.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from hydroslurm.checkpoint.deadline import SAFETY
from hydroslurm.checkpoint.saver import Saver
from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import MUST_NOT_RUN_AGAIN, RUN_AGAIN, ExitForRequeue
from hydroslurm.errors import CoordinatorLost, RanksError, SaveFailed, StaleAttempt
from hydroslurm.runtime.controller import StopRequest
from hydroslurm.training.current_attempt import CurrentAttempt
from hydroslurm.training.notice import notice
from hydroslurm.training.rank_group import RankGroup
from hydroslurm.training.requeue import StopHandler, StopPlan

SaveBy = Callable[[float], str]
"""Saves before a moment of ``time.monotonic()``; what came of it, in words."""


class Stopping:
    """The way out of one run."""

    def __init__(
        self, company: RankGroup, *, attempt: CurrentAttempt, saver: Saver, leaver: StopHandler
    ) -> None:
        self._company = company
        self._attempt = attempt
        self._saver = saver
        self._leaver = leaver

    def obey(self, request: StopRequest, *, step: int, save_by: SaveBy) -> ExitForRequeue:
        """Save and have the job started again; the way out is returned, to be raised."""
        waited_us = (time.monotonic_ns() - request.mono_ns) / 1e3
        self._attempt.record(EventKind.SAFE_POINT, waited_us=waited_us)
        self._leaver.hear(request)  # the controller's thread may be about to
        try:
            orders, saved = self._save(step, save_by)
        except RanksError as error:  # a rank died just now
            return self.leave_unsaved(error, request, step=step)
        late = not self._saver.is_durable and not self._saver.wait(timeout_s=0.0)
        if late:  # the disk is slower than it was
            self._saver.wait(timeout_s=max(0.0, orders.deadline_mono_s - time.monotonic()))
            saved += f"; newest committed step: {self._saver.durable_step}"
        if self._company.rank == 0:
            notice(f"{orders.words}; {saved}")
        departure = self._depart(orders, step=step)
        # the signals stay ours: Slurm sends SIGTERM again, and this process is still leaving
        with contextlib.suppress(
            SaveFailed, StaleAttempt
        ):  # told above; what matters now is the status
            self._saver.close()
        return departure

    def leave_unsaved(
        self, error: RanksError, request: StopRequest | None, *, step: int
    ) -> ExitForRequeue:
        """Ranks are gone, and a state without theirs is none: leave while there is time to, so that
        the job goes on from its newest checkpoint; or fails, where their end is the reason."""
        self._attempt.record(EventKind.AGREEMENT_FAILED, what="stop", words=str(error))
        request = request or _now()
        self._leaver.hear(request)
        self._saver.give_up()
        newest = self._saver.durable_step
        kept = "no checkpoint is committed yet" if newest is None else f"step {newest} is committed"
        try:
            orders = agree_on_orders(self._company, self._leaver, ranks_gone=True)
        except RanksError:  # nobody can be told
            orders = StopPlan("asked", math.inf, False, RUN_AGAIN, request.words)
            if self._company.rank == 0:
                orders = self._leaver.orders(ranks_gone=True)
        words = f"{orders.words}; {error}: step {step} cannot be saved, {kept}"
        if _speaks(self._company, error):
            notice(words)
        return self._depart(orders, step=step)

    # --- inside
    # --------------------------------------------------------------------------------------------

    def _save(self, step: int, save_by: SaveBy) -> tuple[StopPlan, str]:
        """What to do, and what came of the save. A save that is in time whatever Slurm answers does
        not wait for the answer."""
        now_s = time.monotonic()
        mine = {
            "step": step,
            "certain_s": _plain(self._certain_mono_s() - now_s),
            "needs_s": SAFETY * self._saver.estimate().durable.seconds,
        }
        told = self._company.exchange("stop", mine)
        _require_one_step({rank: int(value["step"]) for rank, value in told.items()})
        certain_s = min(_from_plain(value["certain_s"]) for value in told.values())
        if max(float(value["needs_s"]) for value in told.values()) < certain_s:
            saved = save_by(now_s + certain_s)
            return agree_on_orders(self._company, self._leaver), saved
        orders = agree_on_orders(self._company, self._leaver)
        return orders, save_by(orders.deadline_mono_s)

    def _certain_mono_s(self) -> float:
        """The first rank knows the site's policy; it speaks for all."""
        return self._leaver.certain_mono_s() if self._company.rank == 0 else math.inf

    def _depart(self, orders: StopPlan, *, step: int) -> ExitForRequeue:
        departure = depart_together(
            self._company,
            self._leaver,
            orders,
            before=lambda: self._attempt.end(orders.ending, step=step),
        )
        self._attempt.record_end(orders.ending)
        return departure


def agree_on_orders(
    company: RankGroup, leaver: StopHandler, *, ranks_gone: bool = False
) -> StopPlan:
    """What the stop means, as one rank has it from Slurm, for all.

    Raises:
        AgreementFailed, CoordinatorLost: it cannot be told to all.
    """

    def ask() -> dict[str, Any]:
        orders = leaver.orders(ranks_gone=ranks_gone)
        left_s = orders.deadline_mono_s - time.monotonic()  # a moment means nothing elsewhere
        return {**asdict(orders), "deadline_mono_s": _plain(left_s)}

    told = dict(company.decide("orders", ask))
    left_s = _from_plain(told.pop("deadline_mono_s"))
    return StopPlan(**told, deadline_mono_s=time.monotonic() + left_s)


def depart_together(
    company: RankGroup,
    leaver: StopHandler,
    orders: StopPlan,
    *,
    before: Callable[[], None] | None = None,
) -> ExitForRequeue:
    """Have one rank do what is to be done once, and then leave, all with one status.

    Args:
        before: done by the rank that has the job requeued, before it does.
    """

    def leave() -> int:
        try:
            if before is not None:
                before()
        except StaleAttempt as error:
            notice(str(error))
            return MUST_NOT_RUN_AGAIN
        return int(leaver.depart(orders).code or 0)

    try:
        code = int(company.decide("depart", leave))
    except RanksError:  # the first rank, if it is there, answers for the job
        code = leave() if company.rank == 0 else orders.exit_code
    company.part()
    return ExitForRequeue(code)


def _speaks(company: RankGroup, error: RanksError) -> bool:
    """Whether this rank is the first of those that are left; without a hub nobody knows."""
    if isinstance(error, CoordinatorLost):
        return True
    missing = getattr(error, "missing", ())
    return company.rank == min(set(range(company.world_size)).difference(missing), default=0)


def _now() -> StopRequest:
    return StopRequest(None, 0, time.monotonic_ns(), time.time_ns())


def _plain(seconds: float) -> float | None:
    """JSON has no infinity."""
    return None if math.isinf(seconds) else seconds


def _from_plain(seconds: float | None) -> float:
    return math.inf if seconds is None else float(seconds)


def _require_one_step(steps: dict[int, int]) -> None:
    """Ranks that call different numbers of safe points do not stop at one step.

    Raises:
        RanksError: they are at different steps; a state of both is none.
    """
    if len(set(steps.values())) > 1:
        listed = ", ".join(f"rank {rank}: {step}" for rank, step in steps.items())
        raise RanksError(
            f"the ranks are at different steps ({listed}): some have called safe_point() or "
            "check_stop() more often than others, and all ranks have to come to the same ones"
        )

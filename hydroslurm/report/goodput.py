"""The goodput of a whole run: the attempts of its first rank within the allocations of its job.

:mod:`hydroslurm.core.goodput` defines goodput and its sums. Allocated and wall time come from Slurm
if it was asked; for attempts unknown to it, from their events. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from hydroslurm.core.goodput import Account, Goodput
from hydroslurm.report.attempts import Attempt
from hydroslurm.report.external_sources import Accounting
from hydroslurm.report.history import History


def goodput_of(history: History, accounting: Accounting) -> Goodput | None:
    """Compute the goodput; None for a run without events."""
    if not history.attempts:
        return None
    attempts = history.attempts_of(history.ranks[0])
    allocations = _allocations(history, accounting, attempts)
    account = Account()
    for allocation in allocations:
        at_s = allocation.begin_s
        for attempt in allocation.attempts:
            account.add(attempt.time, begin_s=history.begin_s(attempt), since_s=at_s)
            at_s = max(at_s, history.since_begin_s(attempt, attempt.last_mono_ns))
        rest_s = max(0.0, allocation.end_s - at_s)
        if allocation.attempts and allocation.attempts[-1].ended:
            account.goodput.leaving_s += rest_s
        else:
            account.goodput.unknown_s += rest_s
    begin_s = min(a.begin_s for a in allocations)
    first = accounting.of(attempts[0])
    if first is not None and first.submit_epoch_s is not None:
        begin_s = min(begin_s, _since_begin(history, first.submit_epoch_s, 0.0))
    goodput = account.result(
        allocated_s=sum(a.end_s - a.begin_s for a in allocations),
        wall_s=max(a.end_s for a in allocations) - begin_s,
    )
    by_slurm = {a.by_slurm for a in allocations}
    if True in by_slurm:
        goodput.allocated_from = "both" if False in by_slurm else "slurm"
    return goodput


@dataclass
class _Allocation:
    """An allocation, in seconds since the run's begin, and its processes."""

    begin_s: float
    end_s: float
    by_slurm: bool
    attempts: list[Attempt] = field(default_factory=list)


def _allocations(
    history: History, accounting: Accounting, attempts: Sequence[Attempt]
) -> list[_Allocation]:
    """Return the allocations in order of time, without overlaps."""
    by_attempt: dict[object, _Allocation] = {}
    for attempt in attempts:
        begin_s = history.begin_s(attempt)
        end_s = history.since_begin_s(attempt, attempt.last_mono_ns)
        known = accounting.of(attempt)
        key: object = known or id(attempt)
        if known is None:
            by_attempt[key] = _Allocation(begin_s, end_s, False, [attempt])
            continue
        start_s = _since_begin(history, known.start_epoch_s, begin_s)
        stop_s = _since_begin(history, known.end_epoch_s, end_s)
        own = by_attempt.setdefault(key, _Allocation(start_s, stop_s, True))
        own.begin_s, own.end_s = min(own.begin_s, begin_s), max(own.end_s, end_s)
        own.attempts.append(attempt)
    ordered = sorted(by_attempt.values(), key=lambda a: a.begin_s)
    for before, after in itertools.pairwise(ordered):
        after.begin_s = max(after.begin_s, before.end_s)  # a dying process overlaps its successor
        after.end_s = max(after.end_s, after.begin_s)
    return ordered


def _since_begin(history: History, epoch_s: int | None, otherwise_s: float) -> float:
    """Convert a moment of Slurm's."""
    return otherwise_s if epoch_s is None else epoch_s - history.begin_epoch_ns / 1e9

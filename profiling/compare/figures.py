"""The figures of one peer, from what the observers wrote. Pure."""

from __future__ import annotations

import itertools
import signal
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from attempts import Attempt
from drive import Course, Strike

PAUSE_SIGNALS = (signal.SIGTSTP, signal.SIGUSR1)
STOP_SIGNALS = (signal.SIGURG, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


def of_course(
    course: Course,
    attempts: Sequence[Attempt],
    *,
    steps_per_epoch: int,
    steps: int,
    bare_step_s: float,
) -> dict[str, Any]:
    """One peer's part of the JSON. A figure that there is no measurement of is None."""
    pauses = [s for s in course.strikes if s.struck and s.event.kind == "suspend"]
    stops = [s for s in course.strikes if s.struck and s.event.kind != "suspend"]
    result: dict[str, Any] = {
        "finished": not course.failure,
        "failure": course.failure.splitlines()[0] if course.failure else "",
        "events_struck": len(pauses) + len(stops),
        "by_hand": list(course.by_hand),
        **_pauses(pauses, attempts),
        **_stops(stops, attempts, steps_per_epoch),
    }
    wall_s = (course.done_ns - course.submitted_ns) / 1e9
    useful = steps if not course.failure else max((attempt.step for attempt in attempts), default=0)
    trained = [attempt for attempt in attempts if attempt.step_ns]
    ends = [course.submitted_ns, *(attempt.step_ns for attempt in trained)]
    away = [attempt.first_step_ns - end for attempt, end in zip(trained, ends, strict=False)]
    # a Run gives its script the observer of the last attempt back, with what that saw last
    silences = [
        end - begin for one in trained for begin, end in one.silences if begin > one.began_ns
    ]
    return {
        **result,
        "goodput": useful * bare_step_s / wall_s,
        "minutes": wall_s / 60,
        "away_s": sum(away) / 1e9,
        "paused_s": sum(silences) / 1e9,
    }


def of_samples(
    attempts: Sequence[Attempt], whole: Sequence[Attempt], *, steps_per_epoch: int
) -> dict[str, Any]:
    """What became of the samples in the steps that count: those that no later attempt made anew.

    Args:
        whole: the attempts of an undisturbed run, whose first epoch has each sample once.
    """
    trained = _trained(whole)
    once = Counter(row for step in range(1, steps_per_epoch + 1) for row in trained.get(step, ()))
    twice = never = 0
    seen: dict[int, Counter[int]] = {}
    for step, rows in _trained(attempts).items():
        seen.setdefault((step - 1) // steps_per_epoch, Counter()).update(rows)
    for epoch in seen.values():
        twice += (epoch - once).total()
        never += (once - epoch).total()
    return {"samples_seen_twice": twice, "samples_never_seen": never}


def _trained(attempts: Sequence[Attempt]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for attempt in attempts:
        found = {step: rows for step, rows in found.items() if step <= attempt.begin}
        found.update(attempt.samples)
    return found


def _pauses(pauses: Sequence[Strike], attempts: Sequence[Attempt]) -> dict[str, Any]:
    to_parked, to_operator = [], []
    for strike in pauses:
        silence = _silence(strike, attempts)
        signalled_ns = _signal(strike, attempts, PAUSE_SIGNALS)
        if silence is None or signalled_ns is None:
            continue
        # frozen inside an operator: its begin is the last stamp, and it did not go on
        to_parked.append(max(0, silence[0] - signalled_ns) / 1e6)
        to_operator.append((silence[1] - strike.resume_sent_ns) / 1e6)
    return {
        "signal_to_parked_ms_p50": _p50(to_parked),
        "resume_command_to_first_operator_ms_p50": _p50(to_operator),
    }


def _stops(stops: Sequence[Strike], attempts: Sequence[Attempt], epoch: int) -> dict[str, Any]:
    lost, to_durable = 0, []
    for before, after in itertools.pairwise(attempts):
        came = [strike for strike in stops if strike.sent_ns < after.began_ns]
        if not came:  # it died of something else: that counts for none
            continue
        strike = came[-1]
        steps = max(0, before.step - after.begin)  # of several groups the others have trained on
        lost += steps
        signalled_ns = _signal(strike, attempts, STOP_SIGNALS)
        # an attempt that goes on with the begin of an epoch has not found a save made for this stop
        for_it = after.begin % epoch != 0 or steps == 0
        if strike.saves and signalled_ns is not None and for_it:
            to_durable.append((strike.saves[-1] - signalled_ns) / 1e6)
    return {
        "steps_lost": lost,
        "steps_lost_per_preemption": lost / len(stops) if stops else None,
        "signal_to_durable_ms_p50": _p50(to_durable),
    }


def _struck(strike: Strike, attempts: Sequence[Attempt]) -> Attempt | None:
    """The attempt that trained when the event came."""
    before = [attempt for attempt in attempts if attempt.began_ns < strike.sent_ns]
    return before[-1] if before else None


def _silence(strike: Strike, attempts: Sequence[Attempt]) -> tuple[int, int] | None:
    """From the last operator before the resume to the first one after it."""
    attempt = _struck(strike, attempts)
    for begin_ns, end_ns in attempt.silences if attempt is not None else ():
        if begin_ns < strike.resume_sent_ns < end_ns:
            return begin_ns, end_ns
    return None


def _signal(strike: Strike, attempts: Sequence[Attempt], wanted: Sequence[int]) -> int | None:
    """When the first of these signals reached the job."""
    attempt = _struck(strike, attempts)
    for number, at_ns in attempt.signals if attempt is not None else ():
        if number in wanted and at_ns > strike.sent_ns:
            return at_ns
    return None


def _p50(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None

"""Ranks that are not all in the same situation when something is wanted of them.

Each scene is a hand-made fault round: besides what its check asserts nothing may hang, no commit
may be lost, and in the end the run has the bits of one that was left alone.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
from faults.plans import Fault, Plan
from faults.rounds import Player
from faults.verdicts import AttemptSeen

from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import RUN_AGAIN

WORLD = 3
THINK_S = 0.03
"""A step takes so long: the run is not over before ranks have heard of what is wanted."""
SLEEP_S = 2.0
Check = Callable[[AttemptSeen], object]
_numbers = itertools.count()


def stopped_together(attempt: AttemptSeen, *, least: int = 0, most: int = 10**6) -> None:
    """All have left to run again, from the one step that they stopped at."""
    assert set(attempt.codes.values()) == {RUN_AGAIN}, attempt.said
    places = [
        event.step for rank in range(WORLD) for event in attempt.of(rank, EventKind.SAFE_POINT)
    ]
    assert len(places) == WORLD
    assert len(set(places)) == 1
    assert attempt.newest == attempt.end_step
    assert least <= attempt.newest <= most


def paused_and_stopped(attempt: AttemptSeen) -> None:
    for rank in range(WORLD):
        parked = attempt.of(rank, EventKind.ALL_PARKED)
        assert [event.data["in_flight"] for event in parked] == [0], attempt.said
    stopped_together(attempt)


def stopped_at_the_beginning(attempt: AttemptSeen) -> None:
    stopped_together(attempt, most=1)


def stopped_after_its_sleep(attempt: AttemptSeen) -> None:
    """The stop was known to rank 1 while it slept."""
    stopped_together(attempt)
    (asked,) = attempt.of(1, EventKind.STOP_REQUESTED)
    (obeyed,) = attempt.of(1, EventKind.SAFE_POINT)
    assert obeyed.mono_ns - asked.mono_ns > SLEEP_S / 2 * 1e9


def saved_twice(attempt: AttemptSeen) -> None:
    stopped_together(attempt, least=2)
    assert attempt.whole[0] == 2


def committed_while_parked(attempt: AttemptSeen) -> None:
    stopped_together(attempt)
    kinds = [event.kind for event in attempt.events[1]]
    assert kinds.index(EventKind.SAVE_COMMITTED) < kinds.index(EventKind.RESUMED)


def stopped_once(attempt: AttemptSeen) -> None:
    stopped_together(attempt)
    assert len(attempt.whole) == 1


def left_again(attempt: AttemptSeen) -> None:
    assert set(attempt.codes.values()) == {RUN_AGAIN}, attempt.said


def left_untrained(attempt: AttemptSeen) -> None:
    left_again(attempt)
    assert attempt.newest == 0


def saved_after_it(attempt: AttemptSeen) -> None:
    stopped_together(attempt, least=11)
    assert len(attempt.whole) > 1


def others_left(attempt: AttemptSeen) -> None:
    (victim,) = [fault.rank for fault in attempt.fired if fault.what == "kill"]
    assert attempt.codes[victim] == -signal.SIGKILL
    others = {code for rank, code in attempt.codes.items() if rank != victim}
    assert others == {RUN_AGAIN}, attempt.said


def others_saved_nothing(attempt: AttemptSeen) -> None:
    others_left(attempt)
    assert "is gone" in attempt.said or "gone: rank" in attempt.said
    assert attempt.newest >= 2


def others_committed(attempt: AttemptSeen) -> None:
    others_left(attempt)
    assert {event.step for event in attempt.of(1, EventKind.SAFE_POINT)} == {attempt.newest}


def error_of_one(attempt: AttemptSeen) -> None:
    assert attempt.codes[1] == 1
    assert {attempt.codes[0], attempt.codes[2]} <= {1, RUN_AGAIN}, attempt.said
    assert attempt.newest >= 2


RESUME = "1 event all_parked 1 resume"
SAVES = {"every_steps": 2}
WORKERS = {"workers": 2}
CHECKS = {"checks": 4}
"""Each step is followed by so many collectives, as in an evaluation, with a check after each."""
SCENES: list[tuple[str, str, dict[str, Any], Check]] = [
    # what it is; RANK MOMENT NTH WHAT SECONDS of each fault; options; what is asserted
    (
        "SIGTERM to all, loader workers too: those live on until their rank leaves",
        *("0 step 3 stop_all", WORKERS, stopped_together),
    ),
    (
        "long: a rank is paused while workers bring batches",
        *(f"1 step 3 pause 60, {RESUME}, 2 step 9 term", WORKERS, paused_and_stopped),
    ),
    (
        "suspended as Slurm does it, workers too",
        *("1 step 3 suspend 0.8, 2 step 9 term", WORKERS, stopped_together),
    ),
    (
        "a rank that sleeps counts as parked, and what it wants to do then is held",
        "1 step 3 delay 1, 0 step 3 pause 60, 0 event all_parked 1 resume, 2 step 9 term",
        *({}, paused_and_stopped),
    ),
    (
        "a stop waits for the rank that sleeps between two steps",
        *(f"1 step 3 delay {SLEEP_S}, 0 step 3 term", {}, stopped_after_its_sleep),
    ),
    *(
        (
            f"{long}a stop of rank {told} before all ranks have come",
            *(f"1 group 1 delay 3, {told} claimed 1 term", {}, left_untrained),
        )
        for told, long in ((0, ""), (2, "long: "))
    ),
    (
        "a stop while ranks choose what to load",
        *("2 agree resume 1 term", {}, stopped_at_the_beginning),
    ),
    (
        "a stop before the first step",
        "0 event attempt_began 1 term, 1 event attempt_began 1 delay 0.5",
        *({}, stopped_at_the_beginning),
    ),
    *(
        (
            f"{long}a stop at check {check} of an evaluation",
            *(f"{check % WORLD} check {check} term", CHECKS, stopped_together),
        )
        for check, long in ((9, ""), (10, "long: "), (11, "long: "), (12, "long: "))
    ),
    (
        "Slurm preempts a suspended job: SIGCONT, and SIGTERM to all right behind it",
        *("1 step 3 suspend 0.6, 1 event resumed 1 stop_all", {}, stopped_together),
    ),
    (
        "a stop while a rank still writes its part: that save is finished, and another one made",
        *("1 agree save/written 1 delay 0.6, 0 event save_staged 1 term", SAVES, saved_twice),
    ),
    (
        "a pause with nothing committed: the commit is made while all are parked",
        "1 agree save/written 1 pause 60, 2 agree save/written 1 delay 0.4, "
        "1 event save_committed 1 resume, 0 step 9 term",
        *(SAVES, committed_while_parked),
    ),
    (
        "more signals while the save of a stop is written",
        "0 step 3 term, 1 event safe_point 1 term_twice, 2 agree save/written 1 urg, "
        "0 agree run/exit 1 stop_all",
        *({}, stopped_once),
    ),
    *(
        (
            f"{long}rank {victim} dies where all stop: the others save nothing",
            f"0 step 5 await_commit, 1 step 5 term, {victim} agree run/stop 1 kill",
            *(SAVES, others_saved_nothing),
        )
        for victim, long in ((0, ""), (2, "long: "))
    ),
    *(
        (
            f"{long}rank {victim} dies when all parts of a stop are on the disk: another commits",
            *(f"1 step 5 term, {victim} agreed save/written 1 kill", {}, others_committed),
        )
        for victim, long in ((0, "long: "), (2, ""))
    ),
    *(
        (
            f"{long}the coordinator dies during a stop, {moment}",
            *(f"1 step 5 term, 0 {moment} 1 kill_coordinator", {}, left_again),
        )
        for moment, long in (
            *(("agree run/stop", "long: "), ("agreed run/stop", "")),
            ("agreed run/plan", "long: "),
        )
    ),
    *(
        (
            f"{long}the coordinator dies when all parts are written, and rank {rank} is late",
            f"{rank} agree save/written 1 delay 0.4, 0 event save_staged 1 kill_coordinator, "
            "1 step 16 await_commit, 1 step 17 term",
            *(SAVES, saved_after_it),
        )
        for rank, long in ((0, ""), (2, "long: "))
    ),
    (
        "a rank raises where another is told to stop",
        *("0 step 5 await_commit, 1 step 6 error, 0 step 6 term", SAVES, error_of_one),
    ),
]
FAULT = re.compile(r"(\d) ([a-z_/ ]+?) (\d+) (\w+)(?: ([\d.]+))?")


@pytest.mark.parametrize(
    ("text", "options", "check"),
    [
        pytest.param(*scene, id=name, marks=[pytest.mark.long] if name[:5] == "long:" else [])
        for name, *scene in SCENES
    ],
)
def test_all_pause_and_stop_together(
    text: str, options: dict[str, Any], check: Check, player: Player
) -> None:
    """What is done to one rank, or at a place of its own, is done by all, at one step."""
    faults = tuple(
        Fault(int(rank), moment, int(nth), what, float(seconds or 0))
        for one in text.split(", ")
        for rank, moment, nth, what, seconds in FAULT.findall(one)
    )
    options = {"keep": 100, "think_s": THINK_S, **options}
    outcome = player.play(Plan(0, next(_numbers), WORLD, "ddp", options, (faults,)))
    assert not outcome.complaints, f"{outcome.complaints}\n{outcome.said}"
    attempt = outcome.attempts[0]
    assert set(attempt.fired) == set(faults), outcome.said
    check(attempt)

"""What a rank's status answers to a request, for a rank that is alone and for one of several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hydroslurm.core.ack import (
    Answer,
    Judge,
    judge_pause,
    judge_resume,
    judge_stop,
    judge_vacate,
    wait_for_answers,
)
from hydroslurm.core.events import Event, EventKind
from hydroslurm.core.status import RankStatus, after, fold, read_status

MS = 1_000_000
Line = tuple[str, int, dict[str, Any]]

_PARKED = {"park_us": 2000.0, "held": 1, "requested_mono_ns": 10 * MS}
_ALL = {"of_ranks": [1], "in_flight": 0, "rounds": 2, "let_through": 0}
_GB = {"moved_bytes": 2 * 10**9}
LINES: dict[str, Line] = {
    "installed": ("installed", 1, {}),
    "joined": ("ranks_joined", 2, {"world_size": 4}),
    "closed": ("gate_closed", 10, {"pause": 1, "causes": ["user"], "requested_mono_ns": 10 * MS}),
    "parked": ("parked", 12, _PARKED),
    "waiting": ("parked", 12, {**_PARKED, "held": 0}),
    "of_four": ("parked", 12, {**_PARKED, "world_size": 4}),
    "through": ("let_through", 14, {}),
    "parked_again": ("parked", 15, {**_PARKED, "world_size": 4, "park_us": 5000.0}),
    "all": ("all_parked", 18, _ALL),
    "all_but_two": ("all_parked", 18, {**_ALL, "in_flight": 2}),
    "cut_off": ("agreement_failed", 16, {"what": "connection"}),
    "lost": ("coordinator_lost", 14, {"message": "gone"}),
    "opened": ("resumed", 15, {"causes": []}),
    "closed_2": ("gate_closed", 15, {"pause": 2, "causes": ["user"]}),
    "parked_2": ("parked", 16, {**_PARKED, "world_size": 4, "park_us": 1000.0}),
    "causes": ("causes_changed", 20, {"causes": ["user", "slurm"]}),
    "peers": ("causes_changed", 20, {"causes": ["peers"]}),
    "no_cause": ("causes_changed", 13, {"causes": []}),
    "resumed": ("resumed", 21, {"held": 1, "causes": [], "requested_mono_ns": 21 * MS}),
    "idle": ("resumed", 21, {"held": 0, "causes": []}),
    "released": ("first_operator_released", 22, {}),
    "moved": ("vacated", 40, {**_GB, "vacate_s": 0.35}),
    "kept": ("not_vacated", 40, {"reason": "no room"}),
    "asked": ("causes_changed", 20, {"causes": ["vacated"]}),
    "restored": ("restored", 370, {**_GB, "restore_s": 0.35}),
    "resumed_late": ("resumed", 371, {"held": 1, "causes": [], "requested_mono_ns": 370 * MS}),
    "released_late": ("first_operator_released", 372, {"resume_us": 8.0}),
    "gone": ("restore_failed", 370, {"reason": "no device", "lost": True}),
    "stop": ("stop_requested", 40, {"requested_mono_ns": 40 * MS}),
    "saved": ("save_committed", 50, {"checkpoint_step": 7}),
    "left": ("uninstalled", 60, {}),
    "requeued": ("requeued", 70, {}),
    "refused": ("requeue_failed", 70, {"reason": "not yours"}),
    "finished": ("run_finished", 70, {}),
}


def event(name: str, *, rank: int = 1) -> Event:
    kind, at_ms, data = LINES[name]
    return Event(EventKind(kind), at_ms * MS, at_ms * MS, rank=rank, pid=9, data=data)


def status(names: str, *, rank: int = 1) -> RankStatus:
    """What these events have come to."""
    found = fold([event(name, rank=rank) for name in ("installed", *names.split())])
    assert found is not None
    return found


def judged(judge: Judge, before: RankStatus, names: str, *, late: bool = False) -> Answer | None:
    """The first answer, when each of these events is seen by itself, or of the last one only when
    the time is over."""
    now = before
    for name in names.split():
        now = after(now, event(name, rank=before.rank))
        if (answer := judge(before, now, False)) is not None:
            return answer
    return judge(before, now, True) if late else None


HELD = "joined closed of_four all"
ON_HOST = "closed parked moved"
COMMITTED = "=step 7 committed 10 ms after the signal; "


@pytest.mark.parametrize(
    ("judge", "before", "events", "done", "words"),
    [
        # parked is enough where there are no others; closed is not
        (judge_pause, "", "closed", None, ""),
        (judge_pause, "", "closed parked", True, "=parked after 2000 us"),
        (judge_pause, "", "closed waiting", True, "us, it was waiting and issues nothing"),
        # of several neither its own parking, nor that the peers' cause has joined, nor that it
        # parks again behind a collective; all ranks parked is, and both latencies are told
        (judge_pause, "joined", "closed of_four causes through parked_again", None, ""),
        (judge_pause, "joined", "closed of_four causes through parked_again all", True,
         "=parked after 2000 us; all 4 ranks at one collective after 8.0 ms"),
        (judge_pause, "joined", "closed of_four all_but_two", True,
         "with 2 collectives in flight: a suspend longer than their time-out"),
        # what ends a pause of several: the others are not waited for
        (judge_pause, "joined", "closed of_four cut_off", False, "alone: its connection is go"),
        (judge_pause, "joined", "closed of_four stop", False, "a stop wins over a pause"),
        (judge_pause, "joined", "closed of_four left", False, "ended before it could answer"),
        # let go when the coordinator is gone is no end: the next one has all ranks parked again
        (judge_pause, "joined", "closed of_four lost opened closed_2 parked_2 all", True,
         "all 4 ranks at one collective after 3.0 ms"),
        # held together with the others, at once; closed by its peers just now, not
        (judge_pause, HELD, "causes", True, "=held already; causes now: user, slurm"),
        (judge_pause, "joined closed of_four", "causes", None, ""),
        # parked is no answer before the memory is on the host, or will not be; a reason of before
        # is none of now
        (judge_vacate, "", "closed parked", None, ""),
        (judge_vacate, "", ON_HOST, True, "=parked after 2000 us; 2.00 GB vacated in 0.35 s"),
        (judge_vacate, "", "closed parked kept", False, "not vacated: no room"),
        (judge_vacate, "closed parked kept", "causes moved", True, "2.00 GB vacated in 0.35 s"),
        # held for its peers only is not held for good
        (judge_resume, HELD, "peers", None, ""),
        (judge_resume, HELD, "peers resumed released", True, "=running again after 1000 us"),
        (judge_resume, HELD, "causes", False, "=still held for: user, slurm"),
        # a status is some milliseconds old: a pause that it does not tell of yet is no refusal
        (judge_resume, "", "closed parked", None, ""),
        (judge_resume, "", "closed parked idle", True, "=running again; no thread was held"),
        (judge_resume, "", "no_cause", True, "=was running already"),
        # the answer counts from the request, not from when the vacate itself opened the gate
        (judge_resume, ON_HOST, "asked restored resumed_late released_late", True,
         "=running again after 352000 us; 2.00 GB given back in 0.35 s"),
        (judge_resume, ON_HOST, "asked gone", False, "=its device memory is lost: no device"),
        # the rank that asks Slurm tells of the requeue; the others when they leave saved
        (judge_stop, "joined", "stop saved left", True, f"{COMMITTED}left with the others"),
        (judge_stop, "joined", "stop left", False, ""),
        (judge_stop, "", "stop saved requeued", True, f"{COMMITTED}requeued"),
        (judge_stop, "", "stop refused", False, "nothing was left to save; not requeued: not"),
        (judge_stop, "", "stop finished", False, "finished its training meanwhile"),
        (judge_stop, "", "stop left", False, "nothing was left to save; it has left, not requeued"),
    ],
)  # fmt: skip
def test_the_answer_to_a_request(
    judge: Judge, before: str, events: str, done: bool | None, words: str
) -> None:
    """None yet, done or refused, in these words, which are all where they begin with ``=``."""
    answer = judged(judge, status(before, rank=int("requeued" not in events)), events)
    assert (answer and answer.done) == done
    if answer is not None:
        said = answer.message
        assert said == words[1:] if words.startswith("=") else words in said
        assert answer.vacated_bytes == (2 * 10**9 if "vacated in" in said else None)


@pytest.mark.parametrize(
    ("judge", "before", "events", "words"),
    [
        (judge_pause, "closed parked", "", ""),
        (judge_pause, "joined", "", ""),
        (judge_pause, "joined", "closed of_four", "us, alone: the other ranks have not come"),
        (judge_pause, "joined", "closed of_four opened", "resumed before all"),
        (judge_vacate, "", "closed parked", "its device memory has not been moved yet"),
        (judge_resume, HELD, "peers", "another rank"),
        (judge_resume, ON_HOST, "asked", "still held, until its device memory is back"),
    ],
)
def test_when_the_time_is_over(judge: Judge, before: str, events: str, words: str) -> None:
    """Nothing that would still come is waited for, and it is said what has not."""
    assert judged(judge, status(before), events) is None
    answer = judged(judge, status(before), events, late=True)
    assert (answer is None) == (not words)
    if answer is not None:
        assert not answer.done
        assert words in answer.message


def test_the_late_and_the_silent(tmp_path: Path) -> None:
    """When the time is over ranks that are parked alone have answered that, and those that wrote
    nothing, or whose process is another one by now, are absent."""
    before = {}
    for rank, names in enumerate((HELD, "joined closed of_four", "joined", HELD)):
        path = tmp_path / f"rank-{rank:05d}.json"
        path.write_text(status(names, rank=rank).to_json())
        pid = 8 if rank == 3 else 9
        before[rank] = path, RankStatus(rank, "running", status("").since, pid=pid, world_size=4)
    assert read_status(before[0][0]) is not None
    answers = wait_for_answers(before, judge_pause, timeout_s=0.1)
    assert {rank: answer.done for rank, answer in answers.items()} == {0: True, 1: False}

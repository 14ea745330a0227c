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

INSTALLED: Line = ("installed", 1, {})
JOINED: Line = ("ranks_joined", 2, {"world_size": 4})
CLOSED: Line = ("gate_closed", 10, {"pause": 1, "causes": ["user"], "requested_mono_ns": 10 * MS})
PARKED: Line = ("parked", 12, {"park_us": 2000.0, "held": 1, "requested_mono_ns": 10 * MS})
OF_FOUR: Line = ("parked", 12, {**PARKED[2], "world_size": 4})
ALL: Line = ("all_parked", 18, {"of_ranks": [1], "in_flight": 0, "rounds": 2, "let_through": 0})


def event(line: Line, *, rank: int = 1) -> Event:
    kind, at_ms, data = line
    return Event(EventKind(kind), at_ms * MS, at_ms * MS, rank=rank, pid=9, data=data)


def status(*lines: Line, rank: int = 1) -> RankStatus:
    """What these events have come to."""
    found = fold([event(line, rank=rank) for line in (INSTALLED, *lines)])
    assert found is not None
    return found


def judged(judge: Judge, before: RankStatus, *lines: Line, late: bool = False) -> Answer | None:
    """The first answer, when each of these lines is seen by itself, or of the last one only when
    the time is over."""
    now = before
    for line in lines:
        now = after(now, event(line, rank=before.rank))
        if (answer := judge(before, now, False)) is not None:
            return answer
    return judge(before, now, True) if late else None


def test_a_rank_that_is_alone_answers_when_it_is_parked() -> None:
    """Parked is enough where there are no others; closed is not, and neither is what was before."""
    assert judged(judge_pause, status(), CLOSED) is None
    answer = judged(judge_pause, status(), CLOSED, PARKED)
    assert answer == Answer(1, True, "parked after 2000 us")
    assert judge_pause(status(CLOSED, PARKED), status(CLOSED, PARKED), True) is None
    waiting: Line = ("parked", 12, {**PARKED[2], "held": 0})
    answer = judged(judge_pause, status(), CLOSED, waiting)
    assert answer is not None
    assert answer.message == "parked after 2000 us, it was waiting and issues nothing"


def test_one_of_several_answers_when_all_are_parked() -> None:
    """Neither its own parking, nor the news that its peers' cause has joined, nor that it parks
    again behind a collective is the answer; all ranks parked is, and both latencies are told."""
    joined: Line = ("causes_changed", 13, {"causes": ["user", "peers"]})
    again: Line = ("parked", 15, {**OF_FOUR[2], "park_us": 5000.0})
    lines = (CLOSED, OF_FOUR, joined, ("let_through", 14, {}), again)
    assert judged(judge_pause, status(JOINED), *lines) is None
    answer = judged(judge_pause, status(JOINED), *lines, ALL)
    assert answer is not None
    assert answer.done
    assert answer.message == "parked after 2000 us; all 4 ranks at one collective after 8.0 ms"


def test_collectives_in_flight_are_told() -> None:
    """Parked with a collective in flight is done, and the words say what that means."""
    in_flight: Line = ("all_parked", 18, {**ALL[2], "in_flight": 2})
    answer = judged(judge_pause, status(JOINED), CLOSED, OF_FOUR, in_flight)
    assert answer is not None
    assert answer.done
    assert "with 2 collectives in flight: a suspend longer than their time-out" in answer.message


def test_ranks_that_do_not_come_together() -> None:
    """A rank that is parked alone when the time is over says so."""
    assert judged(judge_pause, status(JOINED), late=True) is None
    answer = judged(judge_pause, status(JOINED), CLOSED, OF_FOUR, late=True)
    assert answer is not None
    assert not answer.done
    assert answer.message.startswith("parked after 2000 us, alone: the other ranks have not come")


@pytest.mark.parametrize(
    ("line", "words", "late"),
    [
        (("agreement_failed", 16, {"what": "connection"}), "alone: its connection is gone", False),
        (("resumed", 16, {"causes": []}), "resumed before all", True),
        (("stop_requested", 16, {}), "a stop wins over a pause", False),
        (("uninstalled", 16, {}), "ended before it could answer", False),
    ],
)
def test_what_ends_a_pause_of_several(line: Line, words: str, late: bool) -> None:
    """Without its peers, resumed, stopping or gone: the others are not waited for. A rank that was
    resumed may be parked again by the next coordinator, until the time is over."""
    lines = (CLOSED, OF_FOUR, line)
    assert (judged(judge_pause, status(JOINED), *lines) is None) == late
    answer = judged(judge_pause, status(JOINED), *lines, late=True)
    assert answer is not None
    assert not answer.done
    assert words in answer.message


def test_another_coordinator() -> None:
    """Let go when the coordinator is gone is no end: the next one has all ranks parked again."""
    lost: Line = ("coordinator_lost", 14, {"message": "gone"})
    closed: Line = ("gate_closed", 15, {"pause": 2, "causes": ["user"]})
    again: Line = ("parked", 16, {**OF_FOUR[2], "park_us": 1000.0})
    resumed: Line = ("resumed", 15, {"causes": []})
    answer = judged(judge_pause, status(JOINED), CLOSED, OF_FOUR, lost, resumed, closed, again, ALL)
    assert answer is not None
    assert answer.message.endswith("all 4 ranks at one collective after 3.0 ms")


def test_held_already() -> None:
    """A rank that is held together with the others answers a second pause at once; one that its
    peers have closed just now does not."""
    more: Line = ("causes_changed", 30, {"causes": ["user", "slurm"]})
    answer = judged(judge_pause, status(JOINED, CLOSED, OF_FOUR, ALL), more)
    assert answer == Answer(1, True, "held already; causes now: user, slurm")
    assert judged(judge_pause, status(JOINED, CLOSED, OF_FOUR), more) is None


def test_a_pause_that_vacates() -> None:
    """Parked is no answer before the memory is on the host, or will not be; a reason of before is
    none of now."""
    moved: Line = ("vacated", 40, {"moved_bytes": 2 * 10**9, "vacate_s": 0.35})
    kept: Line = ("not_vacated", 40, {"reason": "no room"})
    assert judged(judge_vacate, status(), CLOSED, PARKED) is None
    late = judged(judge_vacate, status(), CLOSED, PARKED, late=True)
    assert late is not None
    assert late.message.endswith("its device memory has not been moved yet")
    answer = judged(judge_vacate, status(), CLOSED, PARKED, moved)
    message = "parked after 2000 us; 2.00 GB vacated in 0.35 s"
    assert answer == Answer(1, True, message, vacated_bytes=2 * 10**9)
    refused = judged(judge_vacate, status(), CLOSED, PARKED, kept)
    assert refused is not None
    assert (refused.done, refused.message.endswith("not vacated: no room")) == (False, True)
    more: Line = ("causes_changed", 50, {"causes": ["user", "api"]})
    answer = judged(judge_vacate, status(CLOSED, PARKED, kept), more, moved)
    assert answer is not None
    assert answer.done


def test_a_resumed_rank_waits_for_its_peers() -> None:
    """Held for its peers only is not held for good: the next line is its release, or the time is
    over and another rank is named as the reason."""
    before = status(JOINED, CLOSED, OF_FOUR, ALL)
    peers: Line = ("causes_changed", 20, {"causes": ["peers"]})
    assert judged(judge_resume, before, peers) is None
    late = judged(judge_resume, before, peers, late=True)
    assert late is not None
    assert (late.done, "another rank" in late.message) == (False, True)
    resumed: Line = ("resumed", 21, {"held": 1, "causes": [], "requested_mono_ns": 21 * MS})
    released: Line = ("first_operator_released", 22, {})
    answer = judged(judge_resume, before, peers, resumed, released)
    assert answer == Answer(1, True, "running again after 1000 us")
    more: Line = ("causes_changed", 20, {"causes": ["user", "peers"]})
    still = judged(judge_resume, before, more)
    assert still is not None
    assert still.message == "still held for: user, peers"


def test_a_resume_of_a_rank_whose_pause_is_news() -> None:
    """A status is some milliseconds old: a pause that it does not tell of yet is no refusal."""
    assert judged(judge_resume, status(), CLOSED, PARKED) is None
    resumed: Line = ("resumed", 13, {"held": 0, "causes": []})
    answer = judged(judge_resume, status(), CLOSED, PARKED, resumed)
    assert answer == Answer(1, True, "running again; no thread was held")
    nothing: Line = ("causes_changed", 13, {"causes": []})
    answer = judged(judge_resume, status(), nothing)
    assert answer == Answer(1, True, "was running already")


def test_a_resume_that_waits_for_the_memory() -> None:
    """The answer counts from the request, not from when the vacate itself opened the gate, and has
    the bytes; the time being over, it says what is waited for."""
    before = status(CLOSED, PARKED, ("vacated", 15, {"moved_bytes": 2 * 10**9, "vacate_s": 0.3}))
    asked: Line = ("causes_changed", 20, {"causes": ["vacated"]})
    late = judged(judge_resume, before, asked, late=True)
    assert late is not None
    assert late.message == "still held, until its device memory is back"
    answer = judged(
        judge_resume,
        before,
        asked,
        ("restored", 370, {"moved_bytes": 2 * 10**9, "restore_s": 0.35}),
        ("resumed", 371, {"held": 1, "causes": [], "requested_mono_ns": 370 * MS}),
        ("first_operator_released", 372, {"resume_us": 8.0}),
    )
    message = "running again after 352000 us; 2.00 GB given back in 0.35 s"
    assert answer == Answer(1, True, message)
    lost: Line = ("restore_failed", 370, {"reason": "no device", "lost": True})
    answer = judged(judge_resume, before, asked, lost)
    assert answer == Answer(1, False, "its device memory is lost: no device")


def test_one_rank_of_several_is_requeued() -> None:
    """The rank that asks Slurm tells of the requeue; the others have answered when they leave
    saved, and not when nothing was saved."""
    asked: Line = ("stop_requested", 40, {"requested_mono_ns": 40 * MS})
    saved: Line = ("save_committed", 50, {"checkpoint_step": 7})
    left: Line = ("uninstalled", 60, {})
    follower = judged(judge_stop, status(JOINED), asked, saved, left)
    message = "step 7 committed 10 ms after the signal; left with the others"
    assert follower == Answer(1, True, message)
    unsaved = judged(judge_stop, status(JOINED), asked, left)
    assert unsaved is not None
    assert not unsaved.done
    first = judged(judge_stop, status(JOINED, rank=0), asked, saved, ("requeued", 70, {}))
    assert first == Answer(0, True, "step 7 committed 10 ms after the signal; requeued")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([("requeue_failed", 70, {"reason": "not yours"})], "nothing was left to save; not req"),
        ([("run_finished", 70, {})], "finished its training meanwhile"),
        ([("uninstalled", 70, {})], "nothing was left to save; it has left, not requeued"),
    ],
)
def test_what_is_no_requeue(lines: list[Line], words: str) -> None:
    """Each of it ends the waiting."""
    answer = judged(judge_stop, status(), ("stop_requested", 40, {}), *lines)
    assert answer is not None
    assert not answer.done
    assert answer.message.startswith(words)


def test_the_late_and_the_silent(tmp_path: Path) -> None:
    """When the time is over ranks that are parked alone have answered that, and those that wrote
    nothing, or whose process is another one by now, are absent."""
    theirs: dict[int, tuple[Line, ...]] = {
        0: (CLOSED, OF_FOUR, ALL),
        1: (CLOSED, OF_FOUR),
        2: (),
        3: (CLOSED, OF_FOUR, ALL),
    }
    before = {}
    for rank, lines in theirs.items():
        path = tmp_path / f"rank-{rank:05d}.json"
        path.write_text(status(JOINED, *lines, rank=rank).to_json())
        pid = 8 if rank == 3 else 9
        before[rank] = path, RankStatus(rank, "running", status().since, pid=pid, world_size=4)
    assert read_status(before[0][0]) is not None
    answers = wait_for_answers(before, judge_pause, timeout_s=0.1)
    assert {rank: answer.done for rank, answer in answers.items()} == {0: True, 1: False}

"""What a rank's events answer to a request, for a rank that is alone and for one of several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from statusfile import StatusLog

from hydroslurm.core.ack import (
    Answer,
    EventTail,
    Judge,
    JudgePause,
    JudgeResume,
    JudgeStop,
    wait_for_answers,
)
from hydroslurm.core.events import Event, EventKind, EventLog

MS = 1_000_000
CLOSED = ("gate_closed", 10, {"pause": 1, "causes": ["user"], "requested_mono_ns": 10 * MS})
PARKED = ("parked", 12, {"park_us": 2000.0, "held": 1, "requested_mono_ns": 10 * MS})
OF_FOUR = ("parked", 12, {**PARKED[2], "world_size": 4, "causes": ["user"]})
ALL = ("all_parked", 18, {"of_ranks": [1], "in_flight": 0, "rounds": 2, "let_through": 0})

Line = tuple[str, int, dict[str, Any]]


def event(line: Line, *, rank: int = 1) -> Event:
    kind, at_ms, data = line
    return Event(EventKind(kind), at_ms * MS, at_ms * MS, rank=rank, data=data)


def judged(judge: Judge, *lines: Line) -> Answer | None:
    """The first answer."""
    return next((answer for line in lines if (answer := judge(event(line)))), None)


def pausing(tmp_path: Path, *before: Line) -> JudgePause:
    """The judge of a rank that had written this when it was signalled."""
    log = StatusLog(tmp_path / "rank-00001.jsonl")
    for line in before:
        log.append(event(line))
    log.close()
    return JudgePause(tmp_path / "rank-00001.jsonl")


def test_a_rank_that_is_alone_answers_when_it_is_parked(tmp_path: Path) -> None:
    """Parked is enough where there are no others."""
    answer = judged(pausing(tmp_path), CLOSED, PARKED)
    assert answer == Answer(1, True, 2000.0, "parked after 2000 us")


def test_one_of_several_answers_when_all_are_parked(tmp_path: Path) -> None:
    """Neither its own parking, nor the news that its peers' cause has joined, nor that it parks
    again behind a collective is the answer; all ranks parked is, and both latencies are told."""
    judge = pausing(tmp_path)
    joined: Line = ("causes_changed", 13, {"causes": ["user", "peers"]})
    again: Line = ("parked", 15, {**OF_FOUR[2], "park_us": 5000.0})
    assert judged(judge, CLOSED, OF_FOUR, joined, ("let_through", 14, {}), again) is None
    answer = judged(judge, ALL)
    assert answer is not None
    assert (answer.done, answer.latency_us, answer.all_parked_us) == (True, 2000.0, 8000.0)
    assert answer.message == "parked after 2000 us; all 4 ranks at one collective after 8.0 ms"


def test_the_lines_of_two_threads_may_change_places(tmp_path: Path) -> None:
    """The agreement may be written before the parking that it followed; that of the pause before is
    not taken for it."""
    old: Line = ("all_parked", 5, ALL[2])
    assert judged(pausing(tmp_path), old, CLOSED, OF_FOUR) is None
    answer = judged(pausing(tmp_path), ALL, CLOSED, OF_FOUR)
    assert answer is not None
    assert answer.all_parked_us == 8000.0


def test_collectives_in_flight_are_told(tmp_path: Path) -> None:
    """Parked with a collective in flight is done, and the words say what that means."""
    answer = judged(pausing(tmp_path), OF_FOUR, ("all_parked", 18, {**ALL[2], "in_flight": 2}))
    assert answer is not None
    assert answer.done
    assert "with 2 collectives in flight: a suspend longer than their time-out" in answer.message


def test_ranks_that_do_not_come_together(tmp_path: Path) -> None:
    """A rank that is parked alone when the time is over says so, with what is known of why."""
    judge = pausing(tmp_path)
    assert judge.when_late() is None
    failed: Line = ("agreement_failed", 16, {"what": "park", "message": "one is busy"})
    assert judged(judge, CLOSED, OF_FOUR, failed) is None
    late = judge.when_late()
    assert late is not None
    assert (late.done, late.message) == (False, "parked after 2000 us, alone: one is busy")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("agreement_failed", 16, {"what": "connection", "message": "it is gone"}), "alone: it is"),
        (("resumed", 16, {"causes": []}), "resumed before all"),
        (("stop_requested", 16, {}), "a stop wins over a pause"),
        (("uninstalled", 16, {}), "ended before it could answer"),
    ],
)
def test_what_ends_a_pause_of_several(line: Line, words: str, tmp_path: Path) -> None:
    """Without its peers, resumed, stopping or gone: nobody waits for the others any more."""
    answer = judged(pausing(tmp_path), CLOSED, OF_FOUR, line)
    assert answer is not None
    assert not answer.done
    assert words in answer.message


def test_another_hub(tmp_path: Path) -> None:
    """Let go when the coordinator is gone is no end: the next one has all ranks parked again."""
    judge = pausing(tmp_path)
    lost: Line = ("coordinator_lost", 14, {"message": "gone"})
    assert judged(judge, CLOSED, OF_FOUR, lost, ("resumed", 15, {"causes": []})) is None
    again: Line = ("parked", 16, {**OF_FOUR[2], "requested_mono_ns": 15 * MS})
    answer = judged(judge, again, ALL)
    assert answer is not None
    assert answer.all_parked_us == 3000.0


def test_held_already(tmp_path: Path) -> None:
    """A rank that is held together with the others answers a second pause at once; one that its
    peers have closed just now does not."""
    more: Line = ("causes_changed", 30, {"causes": ["user", "slurm"]})
    answer = judged(pausing(tmp_path, CLOSED, OF_FOUR, ALL), more)
    assert answer is not None
    assert answer.done
    assert answer.message.startswith("held already")
    (tmp_path / "rank-00001.jsonl").unlink()
    judge = pausing(tmp_path, CLOSED, OF_FOUR)
    assert judged(judge, more) is None


def test_a_resumed_rank_waits_for_its_peers() -> None:
    """Held for its peers only is not held for good: the next line is its release, or the time is
    over and another rank is named as the reason."""
    judge = JudgeResume(Path())
    assert judged(judge, ("causes_changed", 20, {"causes": ["peers"]})) is None
    late = judge.when_late()
    assert late is not None
    assert (late.done, "another rank" in late.message) == (False, True)
    answer = judged(
        judge, ("resumed", 21, {"held": 1}), ("first_operator_released", 22, {"resume_us": 40.0})
    )
    assert answer == Answer(1, True, 40.0, "running again after 40 us")
    still = judged(JudgeResume(Path()), ("causes_changed", 20, {"causes": ["user", "peers"]}))
    assert still is not None
    assert still.message == "still held for: user, peers"


def test_a_resume_that_waits_for_the_memory() -> None:
    """The answer counts from the request, not from when the vacate itself opened the gate, and has
    the bytes; the time being over, it says what is waited for."""
    judge = JudgeResume(Path())
    assert judged(judge, ("causes_changed", 20, {"causes": ["vacated"]})) is None
    late = judge.when_late()
    assert late is not None
    assert late.message == "still held, until its device memory is back"
    answer = judged(
        judge,
        ("restored", 370, {"moved_bytes": 2 * 10**9, "restore_s": 0.35}),
        ("resumed", 371, {"held": 1}),
        ("first_operator_released", 372, {"resume_us": 8.0}),
    )
    message = "running again after 352000 us; 2.00 GB given back in 0.35 s"
    assert answer == Answer(1, True, 352_000.0, message)


def test_one_rank_of_several_is_requeued(tmp_path: Path) -> None:
    """The rank that asks Slurm tells of the requeue; the others have answered when they leave
    saved, and not when nothing was saved."""
    joined = event(("ranks_joined", 1, {"world_size": 4}))
    paths = [tmp_path / "rank-00000.jsonl", tmp_path / "rank-00001.jsonl"]
    for rank, path in enumerate(paths):
        log = StatusLog(path)
        log.append(event(("ranks_joined", 1, joined.data), rank=rank))
        log.close()
    asked: Line = ("stop_requested", 40, {"requested_mono_ns": 40 * MS})
    saved: Line = ("save_committed", 50, {"checkpoint_step": 7})
    ended: Line = ("attempt_ended", 60, {"ending": "asked"})
    follower = judged(JudgeStop(paths[1]), asked, saved, ended)
    assert follower is not None
    assert follower.done
    assert follower.message == "step 7 committed 10 ms after the signal; leaves with the others"
    unsaved = judged(JudgeStop(paths[1]), asked, ended)
    assert unsaved is not None
    assert not unsaved.done
    first = judged(JudgeStop(paths[0]), asked, saved, ended, ("requeued", 70, {}))
    assert first is not None
    assert first.message.endswith("requeued")


def test_the_late_and_the_silent(tmp_path: Path) -> None:
    """When the time is over ranks that are parked alone have answered that, and those that wrote
    nothing are absent."""
    tails = {rank: EventTail(tmp_path / f"rank-{rank:05d}.jsonl") for rank in range(3)}
    lines: dict[int, tuple[Line, ...]] = {0: (OF_FOUR, ALL), 1: (OF_FOUR,), 2: ()}

    for rank, theirs in lines.items():
        log = EventLog(tails[rank].path)
        for line in theirs:
            log.append(event(line, rank=rank))
        log.close()
    answers = wait_for_answers(tails, JudgePause, timeout_s=0.1)
    assert {rank: answer.done for rank, answer in answers.items()} == {0: True, 1: False}

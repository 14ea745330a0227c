"""Several ranks: one that is paused has all parked, before one collective, with none in flight; it
vacates all their devices or none; and what a person is told of it."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from coordination.attempts import Attempt, Story
from kit.team import coordinator_of
from processes import wait_until
from report.views import figures_of

from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import RUN_AGAIN
from hydroslurm.core.status import RankStatus, read_status
from hydroslurm.report.reading import read_history
from hydroslurm.runtime import client

WORLD = 3
MODEL = Path(__file__).parent.parent / "vacate" / "model.py"


def wait_for(story: Story, kind: EventKind, number: int) -> None:
    """Until all ranks have written so many of these events."""
    wait_until(
        lambda: all(len(story.events(rank, kind)) >= number for rank in range(WORLD)),
        f"{kind.value} {number} of all ranks",
    )


def wait_for_parked(story: Story, number: int) -> None:
    wait_for(story, EventKind.ALL_PARKED, number)


def stop(attempt: Attempt) -> None:
    """One rank is told: all save and leave."""
    attempt.signal(0)
    assert set(attempt.end().codes.values()) == {RUN_AGAIN}, attempt.said


@pytest.mark.parametrize("model", ["ddp", "fsdp"])
def test_one_paused_rank_parks_all(model: str, story: Story) -> None:
    """SIGUSR1 to one rank, again and again, a different one each time: all park, with nothing in
    flight and at the same step or two steps beside one collective; SIGUSR2 to it lets all go on. A
    stop wins over the last pause: all save at one step and leave."""
    attempt = story.begin_training(WORLD, model=model)
    for number in range(1, 6):
        rank = number % WORLD
        attempt.signal(rank, signal.SIGUSR1)
        wait_for_parked(story, number)
        before = [len(story.steps(one)) for one in range(WORLD)]
        assert max(before) - min(before) <= 1
        if number < 5:
            attempt.signal(rank, signal.SIGUSR2)
            for one in range(WORLD):
                story.wait_for_more(2, rank=one)
    stop(attempt)
    assert len({record.end_step for record in story.attempts()}) == 1
    for rank in range(WORLD):
        told = story.events(rank, EventKind.ALL_PARKED)
        assert [event.data["in_flight"] for event in told] == [0] * 5
        assert not story.events(rank, EventKind.AGREEMENT_FAILED)


def test_a_rank_that_dies_in_a_pause_holds_nobody(story: Story) -> None:
    """The paused rank is killed: the others are let go, and fail in their collective, as they would
    have without a pause."""
    attempt = story.begin_training(WORLD)
    attempt.signal(1, signal.SIGUSR1)
    wait_for_parked(story, 1)
    attempt.signal(1, signal.SIGKILL)
    attempt.end()
    assert attempt.codes == {0: 1, 1: -signal.SIGKILL, 2: 1}, attempt.said


def test_the_hub_is_killed(story: Story) -> None:
    """The ranks train on, meet at another coordinator, and pause and stop together as before; also
    when it is killed during a pause, which then begins anew."""
    attempt = story.begin_training(WORLD)
    kill_coordinator(attempt)
    story.wait_for(EventKind.RANKS_JOINED, world=WORLD, times=2)
    attempt.signal(1, signal.SIGUSR1)
    wait_for_parked(story, 1)
    kill_coordinator(attempt)
    wait_for_parked(story, 2)
    attempt.signal(1, signal.SIGUSR2)
    story.wait_for_more(4)
    stop(attempt)


def kill_coordinator(attempt: Attempt) -> None:
    coordinator = coordinator_of(attempt.pids[0])
    assert coordinator is not None
    os.kill(coordinator, signal.SIGKILL)


def calls_of(folder: Path) -> list[str]:
    lines = (folder / "calls").read_text().splitlines()
    return [line.split()[0] for line in lines if not line.startswith("state")]


def test_one_signal_vacates_all(story: Story, tmp_path: Path) -> None:
    """SIGUSR1 to one rank: all are locked before one is checkpointed, and all restored before one
    is unlocked; they train on, and a later pause in which one cannot be locked moves nobody."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "faults.json").write_text("[]")
    attempt = story.begin_training(
        WORLD, vacate=[str(MODEL), str(folder)], environ={"HYDROSLURM_VACATE": "always"}
    )
    attempt.signal(1, signal.SIGUSR1)
    wait_for(story, EventKind.VACATED, 1)
    assert calls_of(folder) == ["lock"] * WORLD + ["checkpoint"] * WORLD
    attempt.signal(1, signal.SIGUSR2)
    wait_for(story, EventKind.RESTORED, 1)
    story.wait_for_more(3)
    assert calls_of(folder)[2 * WORLD :] == ["restore"] * WORLD + ["unlock"] * WORLD

    (folder / "calls").unlink()
    (folder / "faults.json").write_text(json.dumps([["lock", 2, "refuse"]]))
    attempt.signal(2, signal.SIGUSR1)
    wait_for(story, EventKind.NOT_VACATED, 1)
    assert "checkpoint" not in calls_of(folder)
    told = {story.events(rank, EventKind.NOT_VACATED)[0].data["reason"] for rank in range(WORLD)}
    assert len(told) == 1
    assert "CUDA_ERROR_UNKNOWN" in told.pop()
    attempt.signal(2, signal.SIGUSR2)
    story.wait_for_more(3)

    (folder / "faults.json").write_text("[]")
    attempt.signal(0, signal.SIGUSR1)
    wait_for(story, EventKind.VACATED, 2)
    attempt.signal(0)  # a stop, while all are away
    assert set(attempt.end().codes.values()) == {RUN_AGAIN}, attempt.said
    assert calls_of(folder)[-2 * WORLD :] == ["restore"] * WORLD + ["unlock"] * WORLD


def states(story: Story) -> list[RankStatus]:
    found = [read_status(story.run.rank_status(rank)) for rank in range(WORLD)]
    return [state for state in found if state is not None]


def test_the_answer_is_that_all_are_parked(story: Story) -> None:
    """One rank is asked to pause, by its pid: it answers when all are parked, all ranks are seen
    parked together, and its resume lets them all go on; the report tells who was held for whom and
    who was stopped for whom."""
    environ = {"XDG_RUNTIME_DIR": str(story.folder)}
    attempt = story.begin_training(WORLD, environ=environ)
    parked = client.pause(attempt.pids[1], timeout_s=60, environ=environ)
    assert parked.done
    times = rf"parked after (\d+) us.*; all {WORLD} ranks at one collective after ([\d.]+) ms"
    told = re.match(times, parked.message)
    assert told is not None, parked.message
    assert 1e3 * float(told[2]) > float(told[1])
    wait_until(lambda: all(state.parked_together for state in states(story)), "all to say so")
    again = client.pause(attempt.pids[1], timeout_s=60, environ=environ)
    assert (again.done, again.message.startswith("held already")) == (True, True)
    resumed = client.resume(attempt.pids[1], timeout_s=60, environ=environ)
    assert resumed.done, resumed.message
    wait_until(lambda: all(state.state == "running" for state in states(story)), "all to go on")
    os.kill(attempt.pids[2], signal.SIGTERM)
    assert set(attempt.end().codes.values()) == {RUN_AGAIN}, attempt.said

    history = read_history(story.run.root)
    figures = figures_of(history)
    assert (figures.pauses, figures.incomplete, figures.in_flight) == (WORLD, 0, 0)
    assert figures.all_parked_us["count"] == WORLD
    assert {pause.rank: pause.main_cause for pause in history.pauses} == {
        0: "peers",
        1: "user",
        2: "peers",
    }
    assert [stop.of_rank for stop in history.stops] == [2, 2, None]
    assert [stop.missing for stop in history.stops] == [()] * WORLD

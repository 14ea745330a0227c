"""What a person is told of a pause of several ranks, and what its report holds."""

from __future__ import annotations

import os
import re
import signal

from coordination.attempts import Story
from processes import wait_until
from report.views import figures_of

from hydroslurm.core.exitcodes import RUN_AGAIN
from hydroslurm.core.status import RankStatus, read_status
from hydroslurm.report.reading import read_history
from hydroslurm.runtime import client

WORLD = 3


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

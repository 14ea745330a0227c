"""The scripts that stop jobs on a real Slurm run, lose nothing, and print what they promise."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from profiling.scripts import LIMIT_S, PROFILING, run_script
from stories import Stories, stories

from hydroslurm.devcluster.pytest_plugin import require_slurm

sys.path.insert(0, str(PROFILING))

import progress

Printed = Stories[dict[str, Any]]
SCRIPTS = {"stop.py": ["--way", "requeue"], "killwait.py": [], "stock_submitit.py": []}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Printed]:
    """Script -> the JSON of its last line. All run at once: most of their time Slurm waits."""
    require_slurm()
    told = {script: functools.partial(_run, script, options) for script, options in SCRIPTS.items()}
    base = tmp_path_factory.mktemp("runs")
    with stories(told, base, clusters=(), at_a_time=len(told)) as under_way:
        yield under_way


def _run(script: str, options: list[str], folder: Path) -> dict[str, Any]:
    folder.mkdir()
    result, _ = run_script(script, "--json", "--directory", str(folder), *options)
    assert not list(folder.iterdir()), "nothing stays of a run"
    return result


@pytest.mark.slurm
@pytest.mark.slow
def test_stop(printed: Printed) -> None:
    """An operator's requeue is committed, loses no step, and has a figure for each of its parts."""
    result = printed.result("stop.py", LIMIT_S)
    assert (result["stops"], result["committed"], result["steps_lost"]) == (1, 1, 0)
    assert result["state_bytes"] > 5e6
    assert result["cred_expire_s"] == 5
    in_order = [result[f"sigterm_to_{what}_ms_p50"] for what in ("safe_point", "durable")]
    assert 0 < in_order[0] < in_order[1]
    assert result["durable_to_requeued_ms_p50"] > 0
    assert result["eligible_to_first_step_ms_p50"] > 0


@pytest.mark.slurm
@pytest.mark.slow
def test_killwait(printed: Printed) -> None:
    """Both kinds of preemption without grace are committed within KillWait."""
    result = printed.result("killwait.py", LIMIT_S)
    assert (result["preemptions"], result["committed"], result["steps_lost"]) == (2, 2, 0)
    assert result["kill_wait_s"] == 5
    assert 0 < result["sigterm_to_durable_ms_p50"] <= result["sigterm_to_durable_ms_max"]
    assert result["disk_mb_per_s"] > 0


@pytest.mark.slurm
@pytest.mark.slow
def test_stock_submitit(printed: Printed) -> None:
    """Preempted by gang scheduling, stock submitit trains again what it had trained; both ways of
    using hydroslurm lose nothing and end with the bits of a run left alone."""
    result = printed.result("stock_submitit.py", LIMIT_S)
    assert result["steps_lost_gang_stock_docs"] > 0  # from 0 again
    for arm in ("executor", "preemptible"):
        assert result[f"steps_lost_gang_{arm}"] == 0
        assert result[f"same_bits_gang_{arm}"] is True
        assert result[f"preemptions_{arm}"] == 1


def test_steps_lost_are_those_that_the_next_attempt_does_not_begin_with(tmp_path: Path) -> None:
    """An attempt that was killed counts too: its steps were written as they were made."""
    for attempt, (begin, steps) in enumerate([(0, 7), (5, 4), (9, 0)]):
        job = progress.Progress(tmp_path, begin, environ={"SLURM_RESTART_COUNT": str(attempt)})
        for step in range(begin + 1, begin + 1 + steps):
            job.made(step)
    attempts = progress.read_progress(tmp_path)
    assert [(attempt.begin, attempt.end) for attempt in attempts] == [(0, 7), (5, 9), (9, 9)]
    assert progress.steps_lost(attempts) == [2, 0]

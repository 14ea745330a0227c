"""The profiling scripts run and print every figure of the table; how fast they find it is not
tested."""

from __future__ import annotations

import csv
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import require_slurm
from profiling.scripts import LIMIT_S, PROFILING, run_script
from stories import Stories, marked, stories

sys.path.insert(0, str(PROFILING))

import attempts
import harness
import readme_table

EXPECTED: dict[str, dict[str, Any]] = {
    "overhead": {},
    "pause_latency": {"parked_inside_backward": 1.0, "incumbent_parked_inside_backward": 0.0},
    "script": "pause_latency.py",
    "save": {},
    "built_runs": {"top_looks_until_complete": 1},
    "report_speed": {},
    "fused_modules": {"modules": 17},
    "host_reduce": {},
    "ranks_scale": {},
    "ranks": {"stop_skew_steps": 0, "in_flight_when_parked_4": 0, "committed_4": 1},
}
"""Script -> what it finds on every machine."""

ON_SLURM: dict[str, dict[str, Any]] = {
    "stop": {"stops": 1, "committed": 1, "steps_lost": 0},
    "killwait": {"stops": 2, "committed": 2, "steps_lost": 0},
    "suspend_latency": {"parked_before_sigstop": 1.0},
    "storm": {"rpcs_per_start_alone": 3.0},
    "startup": {},
    "long_suspend": {"continued_ddp": 1, "continued_fsdp": 1, "in_flight_ranks": 0},
}


def _wanted(script: str) -> set[str]:
    """The keys that the table has of a script, with the sizes of a quick run."""
    with (PROFILING / "figures.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["script"] == script]
    keys = {key for row in rows for key in (row["key"], row["incumbent_key"])} - {""}
    for size, quick in ((".1gb", ".0.016gb"), (".4gb", ".0.016gb"), ("4096", "128")):
        keys = {key.replace(size, quick) for key in keys}
    return keys


def _check(script: str, result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {key for key in _wanted(script) if result.get(key) is None} == set()
    assert {key: result[key] for key in expected} == expected
    # at most: of requeues at one moment sdiag counts some only (3 of 6 that were all answered)
    assert result.get("rpcs_per_stop_preempted", 0.0) <= 2.0


@pytest.mark.parametrize(
    "script",
    [
        one if one == "fused_modules" else pytest.param(one, marks=pytest.mark.long)
        for one in EXPECTED
    ],
)
def test_a_script_prints_its_figures(script: str, tmp_path: Path) -> None:
    """Each figure of the table is there, and what depends on no machine is as it should be."""
    result, _ = run_script(f"{script}.py", "--json", folder=tmp_path)
    _check(script, result, EXPECTED[script])


@pytest.fixture(scope="module")
def printed(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Stories[dict[str, Any]]]:
    """Script -> the JSON of its last line, of those that are looked at. Several run at once: most
    of their time Slurm waits."""
    require_slurm()
    told = {script: functools.partial(_run, script) for script in marked(request) & {*ON_SLURM}}
    base = tmp_path_factory.mktemp("runs")
    with stories(told, base, clusters=(), at_a_time=3) as under_way:
        yield under_way


def _run(script: str, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    return run_script(f"{script}.py", "--json", folder=folder)[0]


@pytest.mark.slurm
@pytest.mark.long
@pytest.mark.parametrize(
    "script", [pytest.param(one, marks=pytest.mark.scene(one)) for one in ON_SLURM]
)
def test_a_script_on_slurm_prints_its_figures(
    script: str, printed: Stories[dict[str, Any]]
) -> None:
    """The same on a real Slurm: nothing is lost, and little is asked."""
    _check(script, printed.result(script, len(ON_SLURM) * LIMIT_S), ON_SLURM[script])


def test_what_an_attempt_made_is_read_after_it_was_killed(tmp_path: Path) -> None:
    """Its steps were written as they were made; half a line counts for nothing."""
    for begin, steps in [(0, 7), (5, 4), (9, 0)]:
        log = attempts.AttemptLog(tmp_path, begin)
        for step in range(begin + 1, begin + 1 + steps):
            log.made(step)
        log.close()
    with log.path.open("a") as file:
        file.write("step 10")  # and is killed within the line
    seen = attempts.read_attempts(tmp_path)
    assert [(attempt.begin, attempt.step) for attempt in seen] == [(0, 7), (5, 9), (9, 9)]


@pytest.mark.long
def test_bench_keeps_results_and_spares_readme(tmp_path: Path) -> None:
    """A quick bench writes the results where it is told, marked as quick, and changes no page."""
    readme = (PROFILING.parent / "README.md").read_bytes()
    argv = [sys.executable, str(PROFILING / "bench.py"), "--quick", "--only", "report_speed"]
    subprocess.run(
        [*argv, "--out", str(tmp_path)], check=True, timeout=400, stdout=subprocess.DEVNULL
    )
    assert [path.name for path in tmp_path.iterdir()] == ["report_speed.json"]
    assert readme_table.load(tmp_path) == {}
    assert (PROFILING.parent / "README.md").read_bytes() == readme


def test_percentiles_are_values_that_were_seen() -> None:
    """Nearest rank: the median of four is the second, the 99th percentile of few is the largest."""
    assert harness.percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.0
    assert harness.percentile([4.0, 1.0, 3.0, 2.0], 99) == 4.0
    assert harness.median_ratio({"a": [2.0, 6.0, 3.0], "b": [1.0, 2.0, 3.0]}, "a", "b") == 2.0

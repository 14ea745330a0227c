"""Pauses -> figures.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report.ranklog import RankLog

from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import RunFolderError
from hydroslurm.report.figures import figures_of
from hydroslurm.report.history import History, percentile, summary
from hydroslurm.report.reading import read_history
from hydroslurm.report.writing import write_figures


def test_nearest_rank() -> None:
    """A percentile is one of the values: of 1..200 the p50 is 100 and the p99 is 198."""
    values = [float(value) for value in range(1, 201)]
    assert [percentile(values, percent) for percent in (0, 50, 99, 100)] == [1, 100, 198, 200]
    assert percentile([7.0], 50) == 7


def test_summary_leaves_out_what_nobody_measured() -> None:
    """Unknown latencies are not zeros."""
    assert summary([3.0, None, 1.0]) == {"count": 2, "p50": 1.0, "p99": 3.0, "max": 3.0}
    assert summary([None]) == {"count": 0}


def test_fifty_pauses_on_four_ranks(run_dir: RunDir) -> None:
    """200 pauses: each is counted once, under its cause, and the percentiles are of all of them."""
    for rank in range(4):
        log = RankLog(rank=rank, pid=100 + rank).installed()
        for number in range(50):
            cause = "slurm" if number % 2 else "user"
            log.pause(2 * number + 1, cause=cause, park_us=4 * number + rank + 1)
        log.uninstalled(101).write(run_dir)
    figures = figures_of(read_history(run_dir.root))
    assert (figures.pauses, figures.incomplete, figures.ranks) == (200, 0, 4)
    assert figures.park_us == {"count": 200, "p50": 100, "p99": 198, "max": 200}
    assert {cause: group.pauses for cause, group in figures.by_cause.items()} == {
        "slurm": 100,
        "user": 100,
    }
    assert figures.parked_total_s == pytest.approx(200, abs=0.1)
    assert [row.at_s for row in figures.every_pause[:2]] == pytest.approx([1, 3])


def test_incomplete_pauses_and_stops_are_counted(run_dir: RunDir) -> None:
    """A pause that was cut off counts as a pause, and as incomplete."""
    log = RankLog(pid=1).installed().pause(1).pause(3, until="parked")
    log.write(run_dir)
    RankLog(pid=2, restart_count=1).installed(9).uninstalled(10).write(run_dir)
    figures = figures_of(read_history(run_dir.root))
    assert (figures.pauses, figures.incomplete) == (2, 1)
    assert (figures.attempts, figures.restarts, figures.job_ids) == (2, 1, (7,))
    assert [row.outcome for row in figures.every_pause] == ["complete", "not resumed"]


def test_written_whole(run_dir: RunDir) -> None:
    """The file holds the figures, and nothing is left beside it."""
    RankLog().installed().pause(1).uninstalled(5).write(run_dir)
    figures = figures_of(read_history(run_dir.root))
    path = write_figures(figures, run_dir.figures_json)
    assert json.loads(path.read_text()) == json.loads(json.dumps(figures.as_dict()))
    assert [entry.name for entry in run_dir.report.iterdir()] == ["figures.json"]


def test_report_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A file where the folder should be gives an error that names the path."""
    (tmp_path / "report").write_text("")
    with pytest.raises(RunFolderError, match="cannot write"):
        write_figures(figures_of(History(name="x")), RunDir(tmp_path).figures_json)

"""Pauses -> figures.json, which is what its schema and its page say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from report.profiles import profile_of
from report.ranklog import RankLog
from report.views import figures_of
from typer.testing import CliRunner

from hydroslurm.cli import app
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import RunFolderError
from hydroslurm.report.attempts import attempts_of
from hydroslurm.report.external_sources import Accounting, ExternalSources, SlurmAttempt
from hydroslurm.report.history import History, percentile, summary
from hydroslurm.report.reading import read_history
from hydroslurm.report.schema import reference, schema, schema_text
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


def test_report_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A file where the folder should be gives an error that names the path."""
    (tmp_path / "report").write_text("")
    with pytest.raises(RunFolderError, match="cannot write"):
        write_figures(figures_of(History(name="x")), RunDir(tmp_path).figures_json)


ROOT = Path(__file__).resolve().parents[2]
SCHEMA = schema()


def parts() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "figures.json", SCHEMA["properties"]
    for name, part in SCHEMA["$defs"].items():
        yield name, part["properties"]


def test_every_field_is_described() -> None:
    """The page says of each field what it means."""
    for title, properties in parts():
        for name, field in properties.items():
            assert field["description"].strip(), f"{title}.{name}"


def test_numbers_have_units_in_their_names_or_count() -> None:
    """A float without a unit in its name is a ratio."""
    units = ("_s", "_ms", "_us", "_ns", "p50", "p99", "max", "of_allocated", "of_wall")
    for title, properties in parts():
        for name, field in properties.items():
            kinds = field.get("type")
            if "number" in (kinds if isinstance(kinds, list) else [kinds]):
                assert name.endswith(units), f"{title}.{name}"


def test_figures_of_everything_and_of_nothing_are_valid() -> None:
    """What is written is what the schema allows, with every source and with none."""
    validator = jsonschema.Draft202012Validator(SCHEMA)
    validator.check_schema(SCHEMA)
    log = RankLog(pid=1).trains(0, attempt=1).pause(4).pause(6, until="parked")
    log.stop(10, step=40)
    after = RankLog(pid=2, restart_count=1).trains(20, attempt=2, step=30)
    history = History(name="x", attempts=attempts_of([*log.events, *after.events]))
    attempts = tuple(
        SlurmAttempt(
            7, number, "REQUEUED", *(1_700_000_000 + one for one in moments), suspended_s=1
        )
        for number, moments in enumerate(((-5, -4, -2, 11), (11, 15, 18, 40)))
    )
    sources = ExternalSources(Accounting(attempts, 2), (profile_of(log),), ("something",))
    full = figures_of(history, sources)
    assert full.every_pause[0].nsys is not None
    assert full.stops.every_stop[0].slurm_after is not None
    for figures in (full, figures_of(history), figures_of(History(name="x"))):
        validator.validate(json.loads(json.dumps(figures.as_dict(), allow_nan=False)))


def test_the_page_is_up_to_date() -> None:
    """docs/figures.md ends with what ``hydroslurm report --schema --markdown`` prints."""
    page = (ROOT / "docs/figures.md").read_text()
    _, _, made = page.partition("by `hydroslurm report --schema --markdown`.\n\n")
    assert made == reference()


def test_the_command_prints_both() -> None:
    """JSON Schema, or with --markdown the page."""
    run = CliRunner().invoke
    assert run(app, ["report", "--schema"]).output == schema_text()
    assert run(app, ["report", "--schema", "--markdown"]).output == reference()

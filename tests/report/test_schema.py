"""figures.json is what its schema and its page say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
from report.profiles import profile_of
from report.ranklog import RankLog
from typer.testing import CliRunner

from hydroslurm.cli import app
from hydroslurm.report.attempts import attempts_of
from hydroslurm.report.external_sources import Accounting, ExternalSources, SlurmAttempt
from hydroslurm.report.figures import figures_of
from hydroslurm.report.history import History
from hydroslurm.report.schema import reference, schema, schema_text

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

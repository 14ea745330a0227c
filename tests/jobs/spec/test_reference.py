"""The schema for editors and the page for people, both made from the models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from jobs.spec.broken_specs import BROKEN
from typer.testing import CliRunner

from hydroslurm.cli import app
from hydroslurm.jobs.spec.reading import dumps, load
from hydroslurm.jobs.spec.schema import reference, schema, schema_text

ROOT = Path(__file__).resolve().parent.parent.parent.parent
SCHEMA = schema()
BEYOND_A_SCHEMA = {
    # hangs on another field
    "23-uneven-nodes", "24-two-masters", "25-torchrun", "49-elastic", "52-elastic-lr",
    "54-elastic-summation", "55-elastic-averaging", "57-elastic-restart",
    "58-elastic-restart-average", "59-elastic-in-place",
    # said by a list of ours, which may grow
    "28-names-for-slurm", "42-what-cannot-be-handed-on",
    # YAML cannot say it, or says it to us alone
    "06-key-twice",
}  # fmt: skip


def fields() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for part in (SCHEMA, *SCHEMA["$defs"].values()):
        for name, field in part["properties"].items():
            yield part["title"], name, field


def test_every_field_is_described() -> None:
    """An editor shows what each field does, and what holds without it."""
    found = list(fields())
    assert len(found) > 60
    for title, name, field in found:
        message = field.get("description", "")
        assert message.endswith("Required.") or "Default: " in message, (
            f"{title}.{name}: {message!r}"
        )


def test_the_default_that_is_told_is_the_one_that_holds() -> None:
    """Words and models say the same."""
    for title, name, field in fields():
        told = field["description"].rpartition("Default: ")[2].removesuffix(".")
        default = field.get("default")
        if isinstance(default, str):
            assert told in (default, f'"{default}"'), f"{title}.{name}"
        elif default is not None:
            assert yaml.safe_load(told) == default, f"{title}.{name}"
        required = field["description"].endswith("Required.")
        part = next(one for one in (SCHEMA, *SCHEMA["$defs"].values()) if one["title"] == title)
        assert required == (name in part.get("required", ())), f"{title}.{name}"


def test_every_number_has_a_unit() -> None:
    """A number without one is a riddle."""
    for title, name, field in fields():
        kinds = {one.get("type") for one in field.get("anyOf", [field])}
        if kinds & {"integer", "number"}:
            assert field.get("unit"), f"{title}.{name}"


def test_the_schema_is_closed() -> None:
    """An editor underlines a name that there is not."""
    for part in (SCHEMA, *SCHEMA["$defs"].values()):
        assert part["additionalProperties"] is False, part["title"]


def test_the_schema_is_a_schema_and_takes_what_we_take() -> None:
    """Our examples, and every resolved spec, are right for an editor, too."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    example = ROOT / "examples/job.yaml"
    jsonschema.validate(yaml.safe_load(example.read_text()), SCHEMA)
    jsonschema.validate(yaml.safe_load(dumps(load(example).job)), SCHEMA)


def test_the_schema_refuses_what_a_schema_can() -> None:
    """Also by an editor, unless two fields would have to be compared."""
    valid = set()
    for name, broken in BROKEN.items():
        with contextlib.suppress(yaml.YAMLError):
            if jsonschema.Draft202012Validator(SCHEMA).is_valid(yaml.safe_load(broken.text)):
                valid.add(name)
    assert valid == BEYOND_A_SCHEMA


def test_the_page_is_up_to_date() -> None:
    """docs/spec.md ends with what `hydroslurm schema --markdown` prints, and holds the example."""
    page = (ROOT / "docs/spec.md").read_text()
    head, _, made = page.partition("by `hydroslurm schema --markdown`.\n\n")
    assert made == reference()
    assert (ROOT / "examples/job.yaml").read_text() in head


def test_the_command_prints_both() -> None:
    """JSON Schema, or with --markdown the page."""
    run = CliRunner().invoke
    assert run(app, ["schema"]).output == schema_text()
    assert run(app, ["schema", "--markdown"]).output == reference()

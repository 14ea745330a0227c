"""What is said of specs that are none, the schema for editors and the page for people."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from jobs.spec.broken_specs import BROKEN, Broken
from typer.testing import CliRunner

from hydroslurm.cli import app
from hydroslurm.jobs.spec.reading import dumps, load
from hydroslurm.jobs.spec.schema import reference, schema, schema_text

ROOT = Path(__file__).resolve().parent.parent.parent.parent
SCHEMA = schema()
PARTS = (SCHEMA, *SCHEMA["$defs"].values())
BEYOND_A_SCHEMA = {
    # hangs on another field
    "24-two-masters", "25-torchrun", "49-elastic", "52-elastic-lr", "54-elastic-summation",
    "57-elastic-restart", "58-elastic-restart-average", "59-elastic-in-place",
    # said by a list of ours, which may grow
    "42-what-cannot-be-handed-on",
    # YAML cannot say it, or says it to us alone
    "06-key-twice",
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_the_message_names_field_line_and_fix(broken: Broken) -> None:
    """Every wrong field of a spec is said at once, in the message that is recorded, each with its
    line."""
    assert broken.answer() == broken.recorded
    assert re.search(rf"{broken.name}\.yaml:[0-9]+: ", broken.recorded)


def test_every_field_is_described() -> None:
    """An editor shows what each field does, in which unit, and what holds without it, as the models
    have it; and underlines a name that there is not."""
    for part in PARTS:
        assert part["additionalProperties"] is False, part["title"]
        for name, field in part["properties"].items():
            where, said = f"{part['title']}.{name}", field["description"]
            required = said.endswith("Required.")
            assert required or "Default: " in said, where
            assert required == (name in part.get("required", ())), where
            default, told = field.get("default"), said.rpartition("Default: ")[2].removesuffix(".")
            if isinstance(default, str):
                assert told in (default, f'"{default}"'), where
            elif default is not None:
                assert yaml.safe_load(told) == default, where
            kinds = {one.get("type") for one in field.get("anyOf", [field])}
            assert field.get("unit") or not kinds & {"integer", "number"}, where
    assert sum(len(part["properties"]) for part in PARTS) > 60


def test_the_schema_takes_what_we_take_and_refuses_what_a_schema_can() -> None:
    """Our examples, and every resolved spec, are right for an editor, too; what is wrong is not,
    unless two fields would have to be compared."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    example = ROOT / "examples/job.yaml"
    jsonschema.validate(yaml.safe_load(example.read_text()), SCHEMA)
    jsonschema.validate(yaml.safe_load(dumps(load(example).job)), SCHEMA)
    valid = set()
    for name, broken in BROKEN.items():
        with contextlib.suppress(yaml.YAMLError):
            if jsonschema.Draft202012Validator(SCHEMA).is_valid(yaml.safe_load(broken.text)):
                valid.add(name)
    assert valid == BEYOND_A_SCHEMA


def test_the_command_prints_both() -> None:
    """JSON Schema, or with --markdown the page: docs/spec.md ends with it, and holds the
    example."""
    run = CliRunner().invoke
    assert run(app, ["schema"]).output == schema_text()
    page = (ROOT / "docs/spec.md").read_text()
    head, _, made = page.partition("by `hydroslurm schema --markdown`.\n\n")
    assert run(app, ["schema", "--markdown"]).output == made == reference()
    assert (ROOT / "examples/job.yaml").read_text() in head

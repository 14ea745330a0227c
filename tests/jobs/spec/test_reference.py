"""What is said of specs that are none, the schema for editors, and the page for people."""

from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest
import yaml
from processes import captured
from typer.testing import CliRunner, Result

from hydroslurm.cli import app
from hydroslurm.devcluster import DevCluster
from hydroslurm.errors import SpecError
from hydroslurm.jobs.spec.reading import dumps, load, loads, read
from hydroslurm.jobs.spec.schema import reference, schema, schema_text
from hydroslurm.jobs.spec.source import parse_source

ROOT = Path(__file__).resolve().parent.parent.parent.parent
SCHEMA = schema()
PARTS = (SCHEMA, *SCHEMA["$defs"].values())
BEYOND_A_SCHEMA = {
    # hangs on another field
    "24-two-masters", "25-torchrun", "49-elastic", "52-elastic-lr", "54-elastic-summation",
    "57-elastic-restart", "59-elastic-in-place",
    # said by a list of ours, which may grow
    "42-what-cannot-be-handed-on",
    # YAML cannot say it, or says it to us alone
    "06-key-twice",
}  # fmt: skip


FILE = Path(__file__).with_name("broken_specs.txt")
"""A row is its name, its text and the answer, which begins with the file's name or the number of
problems. `python test_reference.py` records what is said now, to be read as its user would."""
_CASE = re.compile(
    r"=== (\S+)\n(.*?)^((?:\d+ problems? in )?\1\.yaml:.*?)(?=^=== |\Z)", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Broken:
    """One of them."""

    name: str
    text: str
    recorded: str

    def answer(self) -> str:
        """What is said of it now."""
        try:
            source = parse_source(self.text, name=f"{self.name}.yaml")
            read(source, folder=Path())
        except SpecError as error:
            return f"{error}\n"
        return f"{self.name}.yaml: is a job spec\n"


BROKEN = {name: Broken(name, text, told) for name, text, told in _CASE.findall(FILE.read_text())}


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


EXAMPLES = Path(__file__).resolve().parent.parent.parent.parent / "examples"


def run(*message: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in message])


def test_validate_looks_at_every_file(tmp_path: Path) -> None:
    """What a right spec is, and in one warning what has no meaning here; one that is wrong does not
    hide the others, and the status says that there was one."""
    right, manifest = EXAMPLES / "job.yaml", EXAMPLES / "t9k-manifest.yaml"
    done = run("validate", right, manifest)
    assert done.exit_code == 0
    first, ok, warning, *listed = done.output.splitlines()
    assert first == f"{right}: ok: digits, 2 worker"
    assert ok.endswith("ok: digits-ddp, 4 worker")
    assert "no effect on Slurm" in warning
    assert [line.strip() for line in listed] == list(load(manifest).meaningless)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(BROKEN["25-torchrun"].text)
    done = run("validate", wrong, right, tmp_path / "absent.yaml")
    assert done.exit_code == 1
    for message in ("3 problems in", "job.yaml: ok", "cannot read"):
        assert message in done.output


def test_render_prints_what_submit_would_hand_to_sbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a trace on the disk; the user's table says what a priority becomes. With --yaml: the
    same job, every default filled in."""
    (tmp_path / "hydroslurm").mkdir()
    table = tmp_path / "hydroslurm/config.yaml"
    table.write_text("priorities: {50: {qos: high, nice: 7}}\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    done = run("render", EXAMPLES / "t9k-manifest.yaml", "--folder", tmp_path / "runs")
    assert done.exit_code == 0
    for line in ("job-name=digits-ddp", "partition=low", "qos=high", "nice=7"):
        assert f"#SBATCH --{line}\n" in done.output
    assert "priority" not in done.output
    assert done.stderr.count("no effect on this Slurm") == 1
    assert all(word in done.stderr for word in ("volumes", "volumeMounts", "tensorboardSpec.image"))
    assert list(tmp_path.iterdir()) == [table.parent]
    done = run("render", "--yaml", EXAMPLES / "job.yaml")
    assert "warningSeconds: 120" in done.output
    assert loads(done.output).job == load(EXAMPLES / "job.yaml").job


@pytest.mark.slurm
def test_render_of_a_script(tmp_path: Path, pause_cluster: DevCluster) -> None:
    """With the options of submit, whose words are read as submit reads them."""
    (tmp_path / "train.py").touch()
    words = ["--folder", "runs", "-p", "low", "--nodes=2", "train.py", "--nodes", "3"]
    render = [sys.executable, "-m", "hydroslurm.cli", "render", *words]
    done = captured(render, cwd=tmp_path, env=pause_cluster.child_environ(), timeout=60)
    assert done.returncode == 0, done.stderr
    for line in ("partition=low", "nodes=2", "job-name=train"):
        assert f"#SBATCH --{line}\n" in done.stdout
    assert "hydroslurm.cli batch --ended" in done.stdout
    assert not (tmp_path / "runs").exists()


if __name__ == "__main__":
    rows = (f"=== {one.name}\n{one.text}{one.answer()}" for one in BROKEN.values())
    FILE.write_text("".join(rows))

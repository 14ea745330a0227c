"""From a file to a :class:`~hydroslurm.jobs.spec.job.TrainingJob` and back."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from hydroslurm.errors import SpecError
from hydroslurm.jobs.spec.fields import is_printable
from hydroslurm.jobs.spec.job import TrainingJob, unused
from hydroslurm.jobs.spec.source import (
    Complaint,
    KeyPath,
    Source,
    parse_source,
    path_text,
    read_source,
)

LISTED = 30
"""Problems in one message."""


@dataclass(frozen=True)
class JobSpec:
    """A job as a file describes it.

    Attributes:
        job: what is to be run.
        folder: absolute; what relative paths in the job are relative to.
        meaningless: fields that have no effect, of a T9k manifest those without a meaning on
            Slurm above all.
        is_manifest: whether it was one.
        engine_why: of an elastic job whose engine has been chosen, why it is that.
    """

    job: TrainingJob
    folder: Path
    meaningless: tuple[str, ...] = ()
    is_manifest: bool = False
    engine_why: str = ""


def load(path: Path, *, to_submit: bool = False) -> JobSpec:
    """Read a job spec, ours or T9k's, that is to run with this Python. A job without a name takes
    the file's.

    Args:
        to_submit: the scripts that it starts have to be there.

    Raises:
        SpecError: as many lines as there are problems, each with field, line and fix.
    """
    spec = read(read_source(path), folder=path.absolute().parent, to_submit=to_submit)
    if "name" in spec.job.model_fields_set:
        return spec
    return replace(spec, job=spec.job.model_copy(update={"name": _name_of(path)}))


def _lacks_scripts(job: TrainingJob, folder: Path) -> Iterator[Complaint]:
    """Commands whose script is not there, each of which would be started backoffLimit times. What
    is in an image, or may be made by an init step, is not known here."""
    if job.run_mode.debug.enable:
        return
    for number, spec in enumerate(job.replica_specs):
        template = spec.template
        script = script_of((*template.command, *template.args))
        if script is None or template.image or template.init:
            continue
        path = folder / (template.working_directory or "") / script
        if not path.exists():
            message = f"there is no file {path}; correct the name, or workingDirectory"
            yield Complaint(("replicaSpecs", number, "template", "command"), message)


_INTERPRETERS = re.compile(r"(python[0-9.]*|bash|sh)")
_TAKES_VALUE = ("-W", "-X", "-o")


def script_of(argv: Sequence[str]) -> str | None:
    """The file of a command that a person has written: ``train.py`` of ``python -u train.py``, or
    ``./train.sh``. None of one that is installed, or where options hide it."""
    program, *words = argv
    if not _INTERPRETERS.fullmatch(program.rpartition("/")[2]):
        return program if "/" in program and not program.startswith("/") else None
    while words and words[0].startswith("-"):
        if re.fullmatch("-[a-zA-Z]*[cm]", words[0]) or words[0] == "-":
            return None
        words = words[2 if words[0] in _TAKES_VALUE else 1 :]
    return words[0] if words else None


def _name_of(path: Path) -> str:
    """Of a job whose file is so called; a name that Slurm cannot show is none."""
    try:
        return is_printable(path.stem) if path.stem.strip() else "training"
    except ValueError:
        return "training"


def loads(text: str, *, name: str = "job.yaml", folder: Path = Path()) -> JobSpec:
    """The same of a text."""
    return read(parse_source(text, name=name), folder=folder.absolute())


def read(source: Source, *, folder: Path, to_submit: bool = False) -> JobSpec:
    """The same of what PyYAML has read."""
    is_manifest = _is_manifest(source.value)
    value: Any = source.value
    place: Callable[[KeyPath], KeyPath] = _as_it_is
    wrong: Sequence[Complaint] = ()
    meaningless: Sequence[str] = ()
    if is_manifest:
        from hydroslurm.jobs.spec import t9k

        of = t9k.translate(value, tables=t9k.read_site_tables(os.environ))
        value, place, wrong, meaningless = of.value, of.origin, of.refusals, of.meaningless
    try:
        job = TrainingJob.model_validate(value)
    except ValidationError as error:
        # a spec without problems needs none of it
        from hydroslurm.jobs.spec.problems import complaints_of

        found = complaints_of(error, value, source=source, place=place)
        raise _refusal((*wrong, *found), source) from None
    if not wrong and to_submit:
        wrong = [replace(one, path=place(one.path)) for one in _lacks_scripts(job, folder)]
    if wrong:
        raise _refusal(wrong, source)
    idle = [f"{path_text(place(one.path))} ({one.message})" for one in unused(job)]
    return JobSpec(job, folder, (*meaningless, *idle), is_manifest=is_manifest)


def _as_it_is(path: KeyPath) -> KeyPath:
    """Where a spec of ours has what the job has at this path."""
    return path


def _is_manifest(value: Any) -> bool:
    """Whether a document claims to be T9k's."""
    return isinstance(value, dict) and (
        value.get("kind") == "PyTorchTrainingJob"
        or str(value.get("apiVersion", "")).startswith("batch.tensorstack")
    )


def _refusal(complaints: Iterable[Complaint], source: Source) -> SpecError:
    """What is wrong with a file, in the order of its lines."""
    ordered = sorted(complaints, key=lambda one: source.line_of(one.path))
    lines = []
    for one in ordered[:LISTED]:
        field = f"{path_text(one.path)}: " if one.path else ""
        lines.append(f"  {source.name}:{source.line_of(one.path)}: {field}{one.message}")
    count = f"{len(ordered)} problem{'s' if len(ordered) != 1 else ''} in {source.name}:"
    if len(ordered) > LISTED:
        count = f"more than {LISTED} problems in {source.name}, of which the first are:"
    return SpecError("\n".join([count, *lines]))


def dumps(job: TrainingJob) -> str:
    """The job in YAML, every field, as :func:`loads` reads it."""
    value = job.model_dump(mode="json", by_alias=True, exclude_none=True)
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))


class _Dumper(yaml.SafeDumper):
    """YAML has four kinds of line break more than people know of; PyYAML folds them like blanks
    unless they are in double quotes."""


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if any(c in "\x85\u2028\u2029\ufeff" for c in text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text_node)

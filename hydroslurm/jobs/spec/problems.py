"""Report what is wrong with a spec: field, line, and how to fix it. Pure."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_snake

from hydroslurm.jobs.spec.fields import NotText, nearest
from hydroslurm.jobs.spec.job import DOES_NOT_FIT, TrainingJob
from hydroslurm.jobs.spec.source import Complaint, KeyPath, Source

MOST_PROBLEMS = 60
"""How many are reported: a file with more is not a job spec."""


def complaints_of(
    error: ValidationError, value: object, *, source: Source, place: Callable[[KeyPath], KeyPath]
) -> tuple[Complaint, ...]:
    """All errors, by their paths in the file.

    Args:
        error: what validating ``value`` as :class:`TrainingJob` raised.
        value: what was validated.
        source: the file.
        place: maps a path in ``value`` to the path in the file that it comes from.
    """
    found: dict[Complaint, None] = {}

    def note(path: KeyPath, message: str) -> None:
        found[Complaint(place(path), message)] = None

    wrong: list[KeyPath] = []
    errors: list[dict[str, Any]] = [
        dict(one)
        for one in error.errors(include_url=False)
        # pydantic counts valid items only: a list of invalid ones is "too short" as well
        if not (one["type"] == "too_short" and one["input"])
    ][:MOST_PROBLEMS]
    if foreign := [one for one in errors if one["loc"] in (("apiVersion",), ("kind",))]:
        errors = foreign  # another format: its fields are not our concern
    misspelt = {_meant(one) for one in errors if one["type"] == "extra_forbidden"}
    for one in errors:
        if one["type"] == DOES_NOT_FIT:
            continue
        path = _as_written(one["loc"], value)
        wrong.append(path)
        if one["type"] != "missing" or path not in misspelt:
            note(path, message_of(one, path, source.written.get(place(path))))
    if not foreign:
        for complaint in _complaints(error, value, wrong):
            note(complaint.path, complaint.message)
    return tuple(found)


def _complaints(error: ValidationError, value: Any, wrong: list[KeyPath]) -> Iterator[Complaint]:
    """Conflicts between fields, even where single fields are invalid: the job is validated again
    without those, and a conflict is reported if it depends on none of them."""
    if wrong and isinstance(value, dict):
        mended = copy.deepcopy(value)
        for path in wrong:
            _take_away(mended, path)
        try:
            TrainingJob.model_validate(mended)
        except ValidationError as second:
            error = second
    for one in error.errors(include_url=False):
        if one["type"] == DOES_NOT_FIT:
            for complaint in one["ctx"]["found"]:
                hangs_on = (complaint.path, *complaint.because)
                if not any(_overlap(path, other) for path in wrong for other in hangs_on):
                    yield complaint


def _overlap(one: KeyPath, other: KeyPath) -> bool:
    size = min(len(one), len(other))
    return one[:size] == other[:size]


def _take_away(value: Any, path: KeyPath) -> None:
    """Remove a field. List items stay, so that the indices of the others do not change."""
    for step in path[:-1]:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return
    if path and isinstance(value, dict):
        value.pop(path[-1], None)


def _as_written(loc: tuple[int | str, ...], value: Any) -> KeyPath:
    """The path as the file spells it: without the ``[key]`` that pydantic adds, with names in place
    of indices where a mapping was read as a list (``env``), and with a field's Python name where
    the file uses that."""
    path: list[int | str] = []
    for part in loc:
        if part == "[key]":
            continue
        if isinstance(part, int) and isinstance(value, dict):
            path.append(list(value)[part])
            break
        if isinstance(value, dict) and part not in value:
            part = next((name for name in value if name == to_snake(str(part))), part)
        path.append(part)
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            value = None
    return tuple(path)


def message_of(error: Mapping[str, Any], path: KeyPath, written: str | None = None) -> str:
    """One of pydantic's errors in our words, without the field's name.

    Args:
        path: where it is. written: what the file has there.
    """
    kind, given, context = error["type"], error.get("input"), error.get("ctx") or {}
    if kind == "extra_forbidden":
        names = tuple(part for part in path if isinstance(part, str))
        return _NOT_HERE.get(names[-2:]) or _unknown(names[-1], fields_at(path[:-1]))
    if kind == "missing":
        return f"is missing; wanted {_REQUIRED[str(error['loc'][-1])]}"
    if kind == "literal_error":
        return _not_one_of(given, str(context["expected"]), path)
    if not path:
        return f"wanted the fields of a job spec, at least replicaSpecs; got {_shown(given)}"
    if kind == "value_error" and isinstance(context["error"], NotText) and written:
        return _no_text(given, path, written)
    if given is None:
        return "is empty; give it a value, or leave the field out"
    if kind == "value_error":
        return str(context["error"])
    if isinstance(given, str) and "env" in path[-2:] and kind.startswith("model_"):
        return (
            f"wanted {{name: {given.partition('=')[0][:60]}, value: ...}}, got both in one string"
        )
    wanted = _WANTED.get(kind)
    if wanted is not None:
        hint = "; remove the quotes" if kind == "int_type" and _is_number(given) else ""
        return f"wanted {wanted.format(**context)}, got {_shown(given)}{hint}"
    return f"{error['msg']}, got {_shown(given)}"


_REQUIRED = {
    "replicaSpecs": "a list of what to run, each with a template and its command",
    "template": "what these replicas run, at least a command",
    "command": "a list such as [python, train.py]",
    "name": "the name of the variable",
}
"""What to write for each field without a default."""

_NOT_HERE: dict[tuple[str, ...], str] = {
    ("scheduler", "priority"): "users cannot set the priority of a job in Slurm; qos can raise it "
    "if you may use such a QOS, and nice lowers it",
    ("scheduler", "queue"): "Slurm calls it partition",
    ("resources", "requests"): "Kubernetes' name; write cpus, memory and gpus here, per replica",
    ("resources", "limits"): "Kubernetes' name; write cpus, memory and gpus here, per replica",
    ("resources", "cpu"): "Kubernetes' name; here it is cpus",
    ("tensorboard", "logdir"): "there is no field 'logdir'; did you mean 'logDirectory'?",
    ("scheduler", "time"): "there is no field 'time'; did you mean 'timeLimitMinutes'?",
}

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "string_type": "text",
    "model_type": "fields with values (name: value)",
    "model_attributes_type": "fields with values (name: value)",
    "dict_type": "names with values (name: value)",
    "tuple_type": "a list",
    "greater_than_equal": "{ge} or more",
    "greater_than": "more than {gt:g}",
    "finite_number": "a number",
    "float_type": "a number",
    "less_than_equal": "{le} or less",
    "too_short": "at least {min_length} item",
    "string_pattern_mismatch": "a name of letters, digits, _ and -, starting with a letter",
}

_FORMATS: dict[KeyPath, str] = {
    ("apiVersion",): "hydroslurm/v1 for a job spec, batch.tensorstack.dev/v1beta1 for a T9k "
    "manifest",
    ("kind",): "TrainingJob for a job spec, PyTorchTrainingJob for a T9k manifest",
}


def _is_number(given: object) -> bool:
    return isinstance(given, str) and given.isascii() and given.isdecimal()


def _no_text(given: object, path: KeyPath, written: str) -> str:
    """The value of an environment variable may be a secret: it is not repeated."""
    kind = "nothing" if given is None else "a number"
    kind = "true or false" if isinstance(given, bool) else kind
    if "env" in path:
        return f"wanted text, got what YAML reads as {kind}; put it in quotes"
    return f'wanted text, got {written}, which YAML reads as {kind}; write "{written}"'


def _meant(error: dict[str, Any]) -> KeyPath:
    """The path that an unknown field was probably meant to be."""
    path: KeyPath = error["loc"]
    near = nearest(str(path[-1]), fields_at(path[:-1]))
    return path if near is None else (*path[:-1], near)


def _unknown(name: str, valid: tuple[str, ...]) -> str:
    near = nearest(name, valid)
    hint = f"did you mean {near!r}?" if near else f"fields here: {', '.join(valid)}"
    return f"there is no field {name[:60]!r}; {hint}"


def _not_one_of(given: object, expected: str, path: KeyPath) -> str:
    if path in _FORMATS:
        return f"wanted {_FORMATS[path]}, got {_shown(given)}"
    valid = [word.strip().strip("'") for word in expected.replace(" or ", ", ").split(", ")]
    if given is None:
        return 'is empty; write "None"' if "None" in valid else f"is empty; {_one_of(valid)}"
    near = nearest(str(given), tuple(valid))
    hint = f"; did you mean {near}?" if near else ""
    return f"{_one_of(valid)}, got {_shown(given)}{hint}"


def _one_of(valid: list[str]) -> str:
    return f"wanted one of {', '.join(valid)}"


def _shown(value: object) -> str:
    """A value in a message: shortened, and only the type of containers."""
    if isinstance(value, dict):
        return "fields with values"
    if isinstance(value, (list, tuple)):
        return "a list" if value else "an empty list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def fields_at(path: KeyPath) -> tuple[str, ...]:
    """The field names that a mapping at this path may have, as YAML spells them."""
    part: type[BaseModel] | None = TrainingJob
    for step in path:
        if isinstance(step, str):
            part = None if part is None else _part_of(part, step)
    if part is None:
        return ()
    return tuple(info.alias or name for name, info in part.model_fields.items())


def _part_of(part: type[BaseModel], name: str) -> type[BaseModel] | None:
    for own, info in part.model_fields.items():
        if name in (own, info.alias):
            return next(_models_in(info.annotation), None)
    return None


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)

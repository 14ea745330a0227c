"""What a job spec may hold: its JSON Schema, and the reference in ``docs/spec.md``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hydroslurm.jobs.spec.job import TrainingJob

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_DESCRIPTION = re.compile(r"(?P<effect>.*?) (?:Default: (?P<default>.*)|Required)\.", re.DOTALL)
_UNIT = re.compile(r" \[([^]]+)\](?= Default: | Required\.)")


def schema() -> dict[str, Any]:
    """JSON Schema of a job spec; each field is described by the text below it in the source."""
    whole = TrainingJob.model_json_schema(by_alias=True)
    for part in (whole, *whole["$defs"].values()):
        for shown in part["properties"].values():
            text = " ".join(shown["description"].split())
            shown["description"] = _UNIT.sub("", text)
            if (unit := _UNIT.search(text)) is not None:
                shown["unit"] = unit[1]
    return {"$schema": _DIALECT, **whole}


def schema_text() -> str:
    """The same as text."""
    return json.dumps(schema(), indent=2) + "\n"


def reference() -> str:
    """Every field in Markdown: a table for each part, in the order in which they are met."""
    whole = schema()
    return "\n".join(_sections("", whole, whole["$defs"]))


def _sections(
    path: str, part: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    yield f"## {f'`{path}`' if path else 'The file'}"
    yield ""
    yield " ".join(part["description"].replace("``", "`").split())
    yield ""
    yield "| field | type | default | unit | effect |"
    yield "| --- | --- | --- | --- | --- |"
    inner = []
    for name, field in part["properties"].items():
        told = _DESCRIPTION.fullmatch(field["description"])
        effect, default = (told["effect"], told["default"]) if told else (field["description"], "")
        shown = "required" if default is None else default
        cells = (f"`{name}`", _type(field), shown, field.get("unit", ""), effect)
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"
        inner += [(f"{path}.{name}".lstrip("."), *found) for found in _parts_of(field)]
    yield ""
    for where, suffix, key in inner:
        yield from _sections(f"{where}{suffix}", parts[key], parts)


def _parts_of(field: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The parts that a field holds, each with what is added to its path."""
    if "$ref" in field:
        yield "", str(field["$ref"]).rpartition("/")[2]
    if "items" in field:
        for suffix, key in _parts_of(field["items"]):
            yield f"[]{suffix}", key
    for one in field.get("anyOf", ()):
        yield from _parts_of(one)


def _type(field: Mapping[str, Any]) -> str:
    """In message."""
    if "anyOf" in field:
        kinds = [_type(one) for one in field["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "enum" in field:
        return ", ".join(f"`{one}`" for one in field["enum"])
    if "$ref" in field:
        return "fields"
    kind = str(field.get("type"))
    if kind == "array":
        return f"list of {_type(field['items'])}"
    if kind == "object":
        return f"names with {_type(field['additionalProperties'])}"
    if kind in ("integer", "number"):
        return f"{'whole ' if kind == 'integer' else ''}number{_range(field)}"
    return {"string": "text", "boolean": "true or false"}[kind]


def _range(field: Mapping[str, Any]) -> str:
    least, most = field.get("minimum"), field.get("maximum")
    if most is not None and most < 2**31 - 3:
        return f", {least} to {most}"
    return "" if least is None else f", {least} or more"

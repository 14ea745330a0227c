"""What figures.json holds, for people: docs/figures.md, made from the schema."""

from __future__ import annotations

import json

from hydroslurm.report.schema import Schema, schema


def reference() -> str:
    """Markdown; docs/figures.md ends with it."""
    whole = schema()
    parts = [_table("figures.json", whole["properties"])]
    for name, part in whole["$defs"].items():
        parts.append(_table(name, part["properties"]))
    return "\n".join(parts)


def _table(title: str, properties: dict[str, Schema]) -> str:
    lines = [f"## {title}", "", "| field | type | meaning |", "| --- | --- | --- |"]
    for name, part in properties.items():
        words = part["description"].replace("|", "\\|")
        lines.append(f"| `{name}` | {_type_words(part)} | {words} |")
    return "\n".join([*lines, ""])


def _type_words(part: Schema) -> str:
    if "$ref" in part:
        return f"[{part['$ref'].rpartition('/')[2]}](#{part['$ref'].rpartition('/')[2]})"
    if "anyOf" in part:
        return " or ".join(_type_words(one) for one in part["anyOf"])
    if "const" in part:
        return json.dumps(part["const"])
    if "enum" in part:
        return ", ".join(f"`{json.dumps(one)}`" for one in part["enum"])
    if part.get("type") == "array":
        return f"list of {_type_words(part['items'])}"
    kinds = part.get("type", "object")
    return kinds if isinstance(kinds, str) else " or ".join(kinds)

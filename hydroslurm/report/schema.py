"""The JSON Schema of figures.json, and the reference page made from it.

Types and descriptions come from the model in :mod:`hydroslurm.report.figures`, those of its rows
from the ``Attributes:`` of their docstrings: nothing is written twice.
"""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from hydroslurm.report.figures import Figures
from hydroslurm.report.history import Summary

Schema = dict[str, Any]


def schema() -> Schema:
    """JSON Schema (2020-12) of figures.json."""
    made = Figures.model_json_schema(mode="serialization", schema_generator=_Generator)
    return {"$schema": _Generator.schema_dialect, **made, "title": "figures.json"}


def schema_text() -> str:
    """The schema as it is printed."""
    return json.dumps(schema(), indent=2) + "\n"


def reference() -> str:
    """The fields as Markdown; docs/figures.md ends with it."""
    whole = schema()
    parts = [_table("figures.json", whole["properties"])]
    parts += [_table(name, part["properties"]) for name, part in whole["$defs"].items()]
    return "\n".join(parts)


def described(kind: type[Any]) -> dict[str, str]:
    """Field -> its description: the text in its annotation, or in the docstrings of a class and its
    bases, where several fields may share one: ``a, b: description``."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        _, _, attributes = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
        for entry in re.split(r"\n(?=    \S)", "\n" + attributes):
            names, colon, text = entry.strip().partition(": ")
            if colon and re.fullmatch(r"\w+(, \w+)*", names):
                found |= dict.fromkeys(names.split(", "), text)
    if issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            found[field.serialization_alias or name] = field.metadata[0]
    return {name: _sentence(text) for name, text in found.items()}


def _sentence(text: str) -> str:
    text = " ".join(text.split()).replace("``", "`").replace(":attr:", "")
    text = re.sub(r"\bNone\b", "null", text)  # in JSON's terms
    return text[:1].upper() + text[1:]


class _Generator(GenerateJsonSchema):
    """pydantic's, without the titles and defaults it makes up, with our descriptions. Every field
    of an object is written, and no other."""

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        return self._complete(super().model_schema(schema), schema["cls"])

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        return self._complete(super().dataclass_schema(schema), schema["cls"])

    def typed_dict_schema(self, schema: Any) -> JsonSchemaValue:
        made = super().typed_dict_schema(schema)
        # the only one; pydantic before 2.9 does not name its class
        return {**self._complete(made, Summary), "required": made["required"]}

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False

    def _complete(self, made: JsonSchemaValue, kind: type[Any]) -> JsonSchemaValue:
        descriptions = described(kind)
        properties = {
            name: {**part, "description": descriptions.get(name, "")}
            for name, part in made["properties"].items()
        }
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }


def _table(title: str, properties: dict[str, Schema]) -> str:
    lines = [f"## {title}", "", "| field | type | meaning |", "| --- | --- | --- |"]
    for name, part in properties.items():
        description = part["description"].replace("|", "\\|")
        lines.append(f"| `{name}` | {_type(part)} | {description} |")
    return "\n".join([*lines, ""])


def _type(part: Schema) -> str:
    if "$ref" in part:
        name = part["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in part:
        return " or ".join(_type(one) for one in part["anyOf"])
    if "const" in part:
        return f"`{json.dumps(part['const'])}`"
    if "enum" in part:
        return ", ".join(f"`{json.dumps(one)}`" for one in part["enum"])
    if part.get("type") == "array":
        return f"list of {_type(part['items'])}" if "items" in part else "list"
    return str(part.get("type", "object"))

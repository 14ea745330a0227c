"""What the parts of a job spec have in common: how they are read, and the kinds of their fields."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict

from hydroslurm.jobs.spec.text import Text

LARGEST = 2**31 - 1
"""Of a number that Slurm is to be told, or that is to be counted up to."""


class Part(BaseModel):
    """Frozen, strict, and closed: a name that is not listed is an error. YAML has the names in
    camelCase, Python in snake_case; both are read."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=to_camel,
        populate_by_name=True,
        hide_input_in_errors=True,
    )


def as_tuple(value: object) -> object:
    """YAML's list, frozen.

    Raises:
        ValueError: a text; says how it would be written as a list.
    """
    if isinstance(value, str):
        raise ValueError(f"wanted a list, got one text; write {_as_list(value[:200])}")
    return tuple(value) if isinstance(value, list) else value


def _as_list(text: str) -> str:
    """The text as a YAML list, split as a shell would."""
    try:
        words = shlex.split(text)
    except ValueError:  # a quote that is not closed
        words = [text]
    return json.dumps(words, ensure_ascii=False)


def unit(name: str) -> JsonDict:
    """For ``json_schema_extra``: what a number counts."""
    return {"unit": name}


Words = Annotated[tuple[Text, ...], BeforeValidator(as_tuple)]
Command = Annotated[tuple[Text, ...], Field(min_length=1), BeforeValidator(as_tuple)]
"""A program and its first arguments."""
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Whole = Annotated[int, Field(ge=0, le=LARGEST)]
"""0 or more."""

"""The kinds of text in a job spec, what each may hold, and which name a misspelt one meant.

The spec is data: no string of it is ever part of a shell command. What ends up in a line of a batch
script is limited to what such a line can carry.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import shlex
from collections.abc import Collection
from fractions import Fraction
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

LONGEST_BYTES = 65536
"""Of one text. Linux hands at most 128 KiB to a program in one argument or variable."""
LONGEST_LINE_BYTES = 200
"""Of what Slurm is to show in a column or to write into its database."""

_SLURM_WORD = re.compile(r"[A-Za-z0-9_.,:@+*/=()\[\]|&-]{1,200}")
_OPTION_NAME = re.compile(r"[a-z][a-z0-9_-]{0,40}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")


class NotText(ValueError):
    """A number, a truth value or nothing where text is wanted."""


def is_text(value: object) -> object:
    """Refuse 1, true and null where text is wanted.

    Raises:
        NotText: strictness alone would not say what to do.
    """
    if value is None or isinstance(value, (bool, int, float)):
        raise NotText("wanted text")
    return value


def _can_be_handed_on(value: str) -> str:
    if "\0" in value:
        raise ValueError("holds a NUL character, which no program can be given")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        odd = value[error.start]
        raise ValueError(f"holds {odd!r}, half of a character; wanted Unicode text") from None
    if size > LONGEST_BYTES:
        raise ValueError(f"is {size} bytes long; at most {LONGEST_BYTES} can be handed on")
    return value


def is_printable(value: str) -> str:
    """Refuse line breaks, control characters and what would be cut off.

    Raises:
        ValueError: says which.
    """
    odd = next((c for c in value if not c.isprintable()), None)
    if odd is not None:
        raise ValueError(f"holds the character {odd!r}; wanted one line of printable text")
    size = len(value.encode())
    if size > LONGEST_LINE_BYTES:
        raise ValueError(f"is {size} bytes long; wanted at most {LONGEST_LINE_BYTES}")
    return value


def _not_blank(value: str) -> str:
    if not value.strip():
        raise ValueError("is blank; wanted a name")
    return value


def slurm_word(value: str) -> str:
    """Refuse what could be more than one word in a line of a batch script.

    Raises:
        ValueError: says what such a word is made of.
    """
    if not _SLURM_WORD.fullmatch(value):
        raise ValueError(
            f"{value[:60]!r} cannot be a name in Slurm; wanted letters, digits and "
            "_ . , : @ + * / = ( ) [ ] | & - without blanks"
        )
    return value


def _option_name(value: str) -> str:
    if not _OPTION_NAME.fullmatch(value):
        bare = value.lstrip("-")
        hint = f"; write {bare}" if _OPTION_NAME.fullmatch(bare) else ""
        raise ValueError(f"{value[:60]!r} is not the long name of an option of sbatch{hint}")
    return value


def _env_name(value: str) -> str:
    name, equals, _ = value.partition("=")
    if equals:  # the value may be a secret
        raise ValueError(f"{name[:60]!r} and a value in one; wanted each in its own field")
    if not _ENV_NAME.fullmatch(value):
        raise ValueError(
            f"{value[:60]!r} cannot name an environment variable; wanted letters, digits and _, "
            "not beginning with a digit"
        )
    return value


Text = Annotated[str, BeforeValidator(is_text), AfterValidator(_can_be_handed_on)]
"""Anything a program can be given: quotes, newlines, ``$(...)`` and all of Unicode but NUL."""
Printable = Annotated[Text, AfterValidator(is_printable)]
"""At most one printable line, of at most 200 bytes."""
Line = Annotated[Printable, AfterValidator(_not_blank)]
"""The same, and not blank."""
SlurmWord = Annotated[Text, AfterValidator(slurm_word)]
"""The name of a partition, an account ...; also lists of them."""
OptionName = Annotated[Text, AfterValidator(_option_name)]
"""The name of an option of sbatch, without dashes in front."""
EnvName = Annotated[Text, AfterValidator(_env_name)]
"""The name of an environment variable."""


_SUFFIXES = {
    "": 1,
    **{suffix: 1000**power for power, suffix in enumerate(("k", "M", "G", "T", "P"), start=1)},
    **{suffix: 1024**power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), start=1)},
}
_AMOUNT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([A-Za-z]{0,2})")

MEMORY_PATTERN = r"^[0-9]+(\.[0-9]+)?([kMGTP]|[KMGTP]i)?$"
"""For JSON Schema; :func:`as_bytes` decides."""
CPUS_PATTERN = r"^[0-9]+(\.[0-9]+)?m?$"
"""The same of :func:`as_cpus`."""


def as_bytes(amount: object) -> int:
    """``8Gi``, ``512M`` or a number of bytes; parts of a byte are rounded up.

    Raises:
        ValueError: not an amount of memory; says what one looks like.
    """
    number, suffix = _split(amount, "an amount of memory", "8Gi, 512Mi or 2G")
    if suffix not in _SUFFIXES:
        raise ValueError(
            f"{amount!r} is not an amount of memory: unknown suffix {suffix!r}. Write for example "
            "8Gi (GiB), 512Mi (MiB) or 2G (GB)"
        )
    return math.ceil(number * Fraction(_SUFFIXES[suffix]))


def as_cpus(amount: object) -> int:
    """``4``, ``"4"`` or ``1500m``, rounded up: Slurm gives out whole CPUs.

    Raises:
        ValueError: not a number of CPUs.
    """
    number, suffix = _split(amount, "a number of CPUs", "4 or 500m")
    if suffix not in ("", "m"):
        raise ValueError(f"{amount!r} is not a number of CPUs; write for example 4 or 500m")
    return math.ceil(number / 1000 if suffix == "m" else number)


def _split(amount: object, what: str, examples: str) -> tuple[Fraction, str]:
    """The number as it is written, and its suffix."""
    if isinstance(amount, int) and not isinstance(amount, bool) and amount >= 0:
        return Fraction(amount), ""
    if isinstance(amount, float) and math.isfinite(amount) and amount >= 0:
        return Fraction(amount), ""
    match = _AMOUNT.fullmatch(amount.strip()) if isinstance(amount, str) else None
    if match is None:
        shown = repr(amount)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise ValueError(f"{shown} is not {what}; write for example {examples}")
    return Fraction(match[1]), match[2]


LARGEST = 2**31 - 1
"""Of a number that Slurm is to be told, or that is to be counted up to."""


class Part(BaseModel):
    """Frozen, strict, and closed: a name that is not listed is an error. YAML has the names in
    camelCase, Python in snake_case; both are read.

    The text below a field is for users too: :func:`~hydroslurm.jobs.spec.schema.schema` takes it
    from there. It says what the field does, ``[what a number counts]``, and its default.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=lambda name: to_camel(re.sub("_s$", "_seconds", name)),
        populate_by_name=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
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
        parts = shlex.split(text)
    except ValueError:  # a quote that is not closed
        parts = [text]
    return json.dumps(parts, ensure_ascii=False)


Words = Annotated[tuple[Text, ...], BeforeValidator(as_tuple)]
Command = Annotated[tuple[Text, ...], Field(min_length=1), BeforeValidator(as_tuple)]
"""A program and its first arguments."""
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Whole = Annotated[int, Field(ge=0, le=LARGEST)]
"""0 or more."""


def nearest(name: str, valid: Collection[str], *, cutoff: float = 0.6) -> str | None:
    """The valid name with the closest spelling, ignoring case, dashes and underscores, or with the
    same letters in another order; None when none is close.

    Args:
        cutoff: the least similarity, from 0 to 1.
    """
    plain, bare = {_bare(one): one for one in valid}, _bare(name)[:60]
    near = difflib.get_close_matches(bare, list(plain), n=1, cutoff=cutoff)
    near = near or [one for one in plain if sorted(one) == sorted(bare)]
    return plain[near[0]] if near else None


def _bare(name: str) -> str:
    """The same for envName, env_name and ENV-NAME."""
    return name.lower().replace("_", "").replace("-", "")

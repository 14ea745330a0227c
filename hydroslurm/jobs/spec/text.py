"""The kinds of text in a job spec, and what each may hold.

The spec is data: no string of it is ever part of a shell command. What ends up in a line of a batch
script is limited to what such a line can carry.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

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

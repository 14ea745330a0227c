"""Figures: fields of a record that are declared with what is shown of them."""

from __future__ import annotations

import functools
from dataclasses import MISSING, field
from typing import Any


def figure(
    meaning: str, heading: str = "", spec: str = "", *, default: Any = None, label: str = "",
    **shown: Any,
) -> Any:  # fmt: skip
    """Declare a field of a dataclass as a figure.

    Args:
        meaning: its description in the schema.
        heading: of its column or row; without one it is in no table.
        spec: number format.
        label: the two moments of a latency whose distribution is shown.
        shown: of a column, as :func:`hydroslurm.report.tables.column_of` has it.
    """
    declared = {"meaning": meaning, "heading": heading, "spec": spec, "label": label}
    return field(default=default, metadata={**declared, "shown": shown})


required = functools.partial(figure, default=MISSING)
"""A figure that a record's constructor requires."""
seconds = functools.partial(figure, default=0.0)
"""One that adds up seconds."""

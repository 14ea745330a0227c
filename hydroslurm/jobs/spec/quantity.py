"""Amounts as Kubernetes writes them: ``500m`` CPUs, ``8Gi`` of memory. Pure.

Source: the Kubernetes API reference on resource quantities. Suffixes of memory are powers of 1000
(k, M, G, T, P) or of 1024 (Ki, Mi, Gi, Ti, Pi); a bare number is bytes. A CPU may be told in
thousandths.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

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

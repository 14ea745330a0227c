"""The gate: holds a rank between two operators and lets it go. :func:`open_gate` chooses which."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, cast, get_args

from hydroslurm.errors import GateError, UsageError

if TYPE_CHECKING:
    import torch

    from hydroslurm.gate.protocol import Gate

GATE_ENV = "HYDROSLURM_GATE"
"""Environment variable that overrides the kind: ``native``, ``hooks`` or ``auto``."""

GateKind = Literal["auto", "native", "hooks"]


def open_gate(
    kind: GateKind = "auto",
    *,
    model: torch.nn.Module | None = None,
    environ: Mapping[str, str] | None = None,
) -> Gate:
    """The gate for this process, not started. The first native one builds its library, in seconds.

    Args:
        kind: ``auto`` is native if that is available, else hooks with a warning that says what is
            lost. ``HYDROSLURM_GATE`` overrides it.
        model: for the hooks, the model whose leaf modules are hooked; default: every module.
        environ: instead of ``os.environ``.

    Raises:
        GateError: ``native`` was requested and cannot be built, loaded or trusted.
        UsageError: no such kind.
    """
    chosen = _chosen(kind, os.environ if environ is None else environ)
    if chosen != "hooks":
        from hydroslurm.gate.native_gate import NativeGate

        try:
            return NativeGate()
        except GateError as error:
            if chosen == "native":
                raise
            _warn_of_loss(error)
    from hydroslurm.gate.hooks import HooksGate

    return HooksGate(model=model)


def _chosen(kind: GateKind, environ: Mapping[str, str]) -> GateKind:
    text = environ.get(GATE_ENV, "").strip().lower()
    where = GATE_ENV if text else "gate"
    wanted = text or kind
    if wanted not in get_args(GateKind):
        raise UsageError(f"{where}={wanted!r}; choose one of {', '.join(get_args(GateKind))}")
    return cast(GateKind, wanted)


def _warn_of_loss(error: GateError) -> None:
    warnings.warn(
        f"hydroslurm: the native gate cannot be used ({error}). Module hooks are used instead: the "
        "rank is held at module boundaries only, not in functional operators, the loss, the "
        "optimizer or copies, nor in a long backward between two modules; earlier Python signal "
        "handlers run only between bytecodes; and each module call costs some microseconds. "
        "To get the native gate: install g++, or let the site build it with `hydroslurm gate build "
        "--out DIR` and set HYDROSLURM_GATE_DIR. HYDROSLURM_GATE=hooks silences this.",
        RuntimeWarning,
        stacklevel=3,
    )

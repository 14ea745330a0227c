"""The gate: holds a rank between two operators and lets it go. :func:`open_gate` chooses which."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

from hydroslurm.errors import GateError, NoCompiler, UsageError

if TYPE_CHECKING:
    import torch

    from hydroslurm.gate.hooks import HooksGate
    from hydroslurm.gate.native_gate import NativeGate

    Gate: TypeAlias = NativeGate | HooksGate

GATE_ENV = "HYDROSLURM_GATE"
"""Environment variable that overrides the kind: ``native``, ``hooks`` or ``auto``."""

GateKind = Literal["auto", "native", "hooks"]

REMEDIES = (
    "Load a compiler (module load gcc, or apt-get install g++), or run hydroslurm gate build on a "
    "login node"
)


def open_gate(
    kind: GateKind = "auto",
    *,
    model: torch.nn.Module | None = None,
    ranks: int = 1,
    environ: Mapping[str, str] | None = None,
) -> Gate:
    """The gate for this process, not started. The first native one builds its library, in seconds.

    Args:
        kind: ``auto`` is native if that is available, else hooks with a warning that says what is
            lost. ``HYDROSLURM_GATE`` overrides it.
        model: for the hooks, the model whose leaf modules are hooked; default: every module.
        ranks: how many pause together. Hooks do not see collectives: they hold one rank only.
        environ: instead of ``os.environ``.

    Raises:
        GateError: ``native`` was requested, or several ranks need it, and it cannot be built,
            loaded or trusted.
        UsageError: no such kind, or hooks for several ranks.
    """
    chosen = _chosen(kind, os.environ if environ is None else environ)
    if chosen == "hooks" and ranks > 1:
        raise UsageError(
            f"module hooks hold one rank, and {ranks} pause together here: leave out {GATE_ENV}="
            "hooks. They need the native gate, which sees collectives"
        )
    if chosen != "hooks":
        from hydroslurm.gate.native_gate import NativeGate

        try:
            return NativeGate()
        except GateError as error:
            if chosen == "native":
                raise
            if ranks > 1:
                raise GateError(
                    f"{ranks} ranks that pause together need the native gate, which cannot be used "
                    f"({error}). {REMEDIES}"
                ) from error
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
    """Once, and in three lines: neither ours nor the user's line of code explains it."""
    why = str(error).partition(". ")[0] if isinstance(error, NoCompiler) else str(error)
    warnings.warn_explicit(
        f"the native gate cannot be used ({why}). Module hooks are used instead:\n"
        "  they hold a rank at module boundaries only, not in the loss, the optimizer or a long "
        f"backward.\n  {REMEDIES}; {GATE_ENV}=hooks silences this",
        RuntimeWarning,
        filename="hydroslurm",
        lineno=1,
        registry=_WARNED,
    )


_WARNED: dict[Any, Any] = {}
"""The memory of the warnings module."""

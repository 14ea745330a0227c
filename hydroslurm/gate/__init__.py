"""The gate, which holds a rank between two operators. :func:`open_gate` chooses its kind."""

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
    """Return this process's gate, not started. The first native one takes seconds to build.

    Args:
        kind: ``auto`` is native if available, else hooks with a warning about the loss.
            ``HYDROSLURM_GATE`` overrides it.
        model: for hooks, the model whose leaf modules are hooked; default: every module.
        ranks: number of ranks that pause together. Hooks do not see collectives, so they can
            hold only one rank.
        environ: instead of ``os.environ``.

    Raises:
        GateError: the native gate was requested, or several ranks need it, and it cannot be built,
            loaded or trusted.
        UsageError: the kind is unknown, or hooks were requested for several ranks.
    """
    chosen = chosen_kind(kind, environ)
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


def chosen_kind(kind: GateKind, environ: Mapping[str, str] | None = None) -> GateKind:
    """The kind that ``HYDROSLURM_GATE`` names, else ``kind``.

    Raises:
        UsageError: no such kind.
    """
    text = (os.environ if environ is None else environ).get(GATE_ENV, "").strip().lower()
    where = GATE_ENV if text else "gate"
    wanted = text or kind
    if wanted not in get_args(GateKind):
        raise UsageError(f"{where}={wanted!r}; choose one of {', '.join(get_args(GateKind))}")
    return cast(GateKind, wanted)


def _warn_of_loss(error: GateError) -> None:
    """Warn once, in four lines; no source line of ours or the user's would explain it."""
    why = str(error).partition(". ")[0] if isinstance(error, NoCompiler) else str(error)
    warnings.warn_explicit(
        f"the native gate cannot be used ({why}). Module hooks are used instead:\n"
        "  they hold a rank at module boundaries only, not in the loss, the optimizer or a long "
        "backward;\n  signals wait for the next line of Python, handlers installed later keep "
        "theirs, and other threads run on to a module.\n"
        f"  {REMEDIES}; {GATE_ENV}=hooks silences this",
        RuntimeWarning,
        filename="hydroslurm",
        lineno=1,
        registry=_WARNED,
    )


_WARNED: dict[Any, Any] = {}
"""Registry of the warnings module."""

"""NCCL's communicators, which hold device memory of their own that a checkpoint cannot take along.
They are suspended around it where torch and NCCL can do that (2.13 and 2.29.7, or newer); else a
rank that has any is not vacated.

A suspension is a collective: it begins with a barrier of the communicator's ranks, without a
time-out, and torch's binding keeps the interpreter's lock meanwhile (seen with 2.13). So it is only
begun once all ranks have agreed on it, and nothing that can fail comes in between; a rank that dies
there leaves the others hanging, to be ended by their launcher.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from hydroslurm.errors import VacateError

NEEDED_NCCL = (2, 29, 7)
NVLS_ENV = "NCCL_NVLS_ENABLE"
_HAS_MULTICAST = (9, 0)


class Communicators:
    """Those of this process's process groups.

    Args:
        environ: the process's own where nothing else is given.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._suspended: list[Any] = []

    def refusal(self) -> str:
        """Why they are in the way; empty if they are not. Not while the device is locked."""
        found = _backends()
        if not found:
            return ""
        has = f"{len(found)} process group{'s' if len(found) > 1 else ''} of NCCL"
        if not all(map(_can_suspend, found)):
            return f"{has} would be in the way, and this torch cannot suspend them; wanted 2.13"
        if (version := _nccl_version()) < NEEDED_NCCL:
            seen, wanted = (".".join(map(str, one)) for one in (version, NEEDED_NCCL))
            return (
                f"{has} would be in the way, and NCCL {seen} cannot suspend them; wanted {wanted}"
            )
        # a checkpoint of a process that has multicast memory never ends, and suspending keeps it
        shared = any(one.size() > 1 for one in found)
        if shared and self._environ.get(NVLS_ENV) != "0" and _capability() >= _HAS_MULTICAST:
            return (
                f"NCCL may use multicast memory (NVLS) on this device, with which a checkpoint "
                f"hangs; start the job with {NVLS_ENV}=0"
            )
        return ""

    def suspend(self) -> None:
        """Give their memory back; on all ranks at a time.

        Raises:
            VacateError: one cannot be suspended; those before it are resumed.
        """
        for one in _backends():
            try:
                one.suspend()
            except Exception as error:  # whatever NCCL says becomes the reason
                self.resume()
                raise VacateError(f"a communicator of NCCL was not suspended: {error}") from error
            self._suspended.append(one)

    def resume(self) -> None:
        """Undo it, in reverse; nothing where nothing is suspended.

        Raises:
            VacateError: some did not come back: their next collective fails.
        """
        mistakes = []
        while self._suspended:
            try:
                self._suspended.pop().resume()
            except Exception as error:
                mistakes.append(str(error))
        if mistakes:
            raise VacateError(
                f"a communicator of NCCL did not come back, and its next collective fails: "
                f"{'; '.join(mistakes)}"
            )


def _can_suspend(backend: Any) -> bool:
    return callable(getattr(backend, "suspend", None)) and callable(
        getattr(backend, "resume", None)
    )


def _nccl_version() -> tuple[int, ...]:
    nccl: Any = sys.modules.get("torch.cuda.nccl")
    return () if nccl is None else tuple(nccl.version()[:3])


def _capability() -> tuple[int, int]:
    found: tuple[int, int] = sys.modules["torch"].cuda.get_device_capability()
    return found


def _backends() -> list[Any]:
    """The NCCL backends of all process groups. Imports nothing: an import could wait for a lock
    that a parked thread holds."""
    torch: Any = sys.modules.get("torch")
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if torch is None or c10d is None or not c10d.is_initialized():
        return []
    device, found = torch.device("cuda"), []
    for group in list(c10d._world.pg_map):
        if "nccl" not in str(c10d.get_backend_config(group)):
            continue
        found.append(group._get_backend(device))
    return found

"""NCCL's communicators, which hold device memory of their own that a checkpoint cannot take along:
with NVLS it hangs. They are suspended around it where torch can do that (2.13 and newer); else a
rank that has any is not vacated.
"""

from __future__ import annotations

import sys
from typing import Any

from hydroslurm.errors import VacateError


class Communicators:
    """Those of this process's process groups."""

    def __init__(self) -> None:
        self._suspended: list[Any] = []

    def refusal(self) -> str:
        """Why they are in the way; empty if they are not."""
        found = _backends()
        unable = [one for one in found if not _can_suspend(one)]
        if not unable:
            return ""
        return (
            f"{len(unable)} process group{'s' if len(unable) > 1 else ''} of NCCL would be in the "
            "way, and this torch cannot suspend "
            f"{'them' if len(unable) > 1 else 'it'}; wanted a ProcessGroupNCCL with suspend() and "
            "resume()"
        )

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
            VacateError: one did not come back: its next collective would fail.
        """
        while self._suspended:
            try:
                self._suspended.pop().resume()
            except Exception as error:
                raise VacateError(f"a communicator of NCCL did not come back: {error}") from error


def _can_suspend(backend: Any) -> bool:
    return callable(getattr(backend, "suspend", None)) and callable(
        getattr(backend, "resume", None)
    )


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

"""Which PCI device a rank's GPU is, asked of NVIDIA's management library.

Not asked of CUDA: a process that has initialised it cannot fork workers that use it, and this is
called before the script's first line. Not tested on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

VISIBLE_ENV = "CUDA_VISIBLE_DEVICES"
_LIBRARY = "libnvidia-ml.so.1"


class _PciInfo(ctypes.Structure):
    """``nvmlPciInfo_t``."""

    _fields_ = [
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_id", ctypes.c_uint),
        ("subsystem_id", ctypes.c_uint),
        ("address", ctypes.c_char * 32),
    ]


def pci_of_rank(local_rank: int, environ: Mapping[str, str]) -> str | None:
    """The PCI address of the GPU that a rank uses, as ``/sys/bus/pci/devices`` spells it; None
    without one.

    It is the GPU of the rank's local number among those that are visible; where only one is
    (``srun --gpus-per-task=1``), that one.
    """
    visible = environ.get(VISIBLE_ENV)
    names = None if visible is None else [one.strip() for one in visible.split(",")]
    if names is None:
        name = str(local_rank)
    elif names == [""] or (len(names) > 1 and local_rank >= len(names)):
        return None
    else:
        name = names[local_rank if len(names) > 1 else 0]
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    if library.nvmlInit_v2() != 0:
        return None
    try:
        return _address(library, name)
    finally:
        library.nvmlShutdown()


def _address(library: ctypes.CDLL, name: str) -> str | None:
    handle, info = ctypes.c_void_p(), _PciInfo()
    if name.isdecimal():
        error = library.nvmlDeviceGetHandleByIndex_v2(
            ctypes.c_uint(int(name)), ctypes.byref(handle)
        )
    else:
        error = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        if not error and name.startswith("MIG"):
            whole = ctypes.c_void_p()
            error = library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
                handle, ctypes.byref(whole)
            )
            handle = whole
    if error or library.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(info)):
        return None
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"

"""The binding of ``native/arena.h``: torch's allocations, in memory whose pages can be taken away
while the addresses stay. Built where it is used, as the gate is.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Mapping
from pathlib import Path

from hydroslurm.errors import GateError, GateSelfTestFailed, NoCompiler, VacateError
from hydroslurm.gate import build
from hydroslurm.gate.compiler import (
    SITE_DIR_ENV,
    Recipe,
    abi_number,
    find_compiler,
)
from hydroslurm.vacate.backend import DeviceState

RECIPE = Recipe(
    what="the library of the arena",
    library="hs_arena.so",
    sources=Path(__file__).parent / "native",
    abi_of="arena.h",
    self_test="hydroslurm.vacate.arena",
)
FLOOR_BYTES = 64 << 10
"""Smaller blocks of the host's memory stay where they were."""
_STATES = (DeviceState.RUNNING, DeviceState.LOCKED, DeviceState.CHECKPOINTED)
_ANSWERS = {
    -errno.EPROTO: "it is not in the state for that",
    -errno.EBUSY: "an earlier call to its driver was given up, and hangs still",
    -errno.ECANCELED: "it was given up",
    -errno.ENOMEM: "no memory is free",
}


class Numbers(ctypes.Structure):
    """``hs_arena_numbers``."""

    _fields_ = (
        ("live_bytes", ctypes.c_int64),
        ("mapped_bytes", ctypes.c_int64),
        ("away_bytes", ctypes.c_int64),
        ("staging_bytes", ctypes.c_int64),
        ("leaked_bytes", ctypes.c_int64),
        ("segments", ctypes.c_int64),
        ("touched", ctypes.c_int64),
        ("failed", ctypes.c_char_p),
        ("why", ctypes.c_char_p),
    )


class Library:
    """The functions. Each gives up the GIL while it runs."""

    def __init__(self, path: Path) -> None:
        """Load it.

        Raises:
            GateError: it cannot be loaded, or is of another ABI.
        """
        self.path = path
        try:
            self.functions = functions = ctypes.CDLL(str(path))
            found = functions.hs_arena_abi()
            arena, out = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
            functions.hs_arena_checkpoint.argtypes = [arena, ctypes.POINTER(ctypes.c_int64)]
            functions.hs_arena_stats.argtypes = [arena, ctypes.POINTER(Numbers)]
            functions.hs_arena_spill.argtypes = [arena, ctypes.c_int]
            functions.hs_arena_serve_cpu.argtypes = [ctypes.c_size_t, out]
            functions.hs_arena_cuda_arena.argtypes = [ctypes.c_int, out]
            functions.hs_arena_why_no_cuda.restype = ctypes.c_char_p
            for verb in ("lock", "restore", "unlock", "state", "abandon"):
                getattr(functions, f"hs_arena_{verb}").argtypes = [arena]
        except (OSError, AttributeError) as error:
            raise GateError(f"{RECIPE.what} {path} cannot be loaded: {error}") from error
        if found != abi_number(RECIPE):
            raise GateError(
                f"{path} has ABI {found}, wanted {abi_number(RECIPE)}; remove it and let it be "
                "rebuilt"
            )

    def serve_cpu(self) -> Arena:
        """Have torch allocate the host's memory from an arena from now on: for good.

        Raises:
            VacateError: it cannot be made.
        """
        made = ctypes.c_void_p()
        error = self.functions.hs_arena_serve_cpu(FLOOR_BYTES, ctypes.byref(made))
        if error:
            raise VacateError(f"the arena cannot be made: {os.strerror(-error)}")
        return Arena(self, made)

    def of_cuda(self, device: int) -> Arena | None:
        """A device's; None where nothing was allocated on it."""
        found = ctypes.c_void_p()
        error = self.functions.hs_arena_cuda_arena(device, ctypes.byref(found))
        return None if error else Arena(self, found)

    def why_no_cuda(self) -> str:
        """Why no device here can have an arena; empty if one can. Opens CUDA's driver."""
        return str(self.functions.hs_arena_why_no_cuda().decode())

    def use_for_cuda(self) -> None:
        """Have torch allocate device memory from arenas: for good, and before it allocates any.

        Raises:
            RuntimeError: it has already.
        """
        import torch

        made = torch.cuda.memory.CUDAPluggableAllocator(
            str(self.path), "hs_arena_cuda_alloc", "hs_arena_cuda_free"
        )
        allocator = made.allocator()  # type: ignore[no-untyped-call]
        for setter, function in (
            (allocator.set_record_stream_fn, self.functions.hs_arena_cuda_record_stream),
            (allocator.set_reset_fn, self.functions.hs_arena_cuda_empty_cache),
        ):
            setter(ctypes.cast(function, ctypes.c_void_p).value)
        torch.cuda.memory.change_current_allocator(made)


class Arena:
    """One arena. The four moving calls block for as long as its driver does."""

    def __init__(self, library: Library, handle: ctypes.c_void_p) -> None:
        self._functions = library.functions
        self._handle = handle

    @property
    def numbers(self) -> Numbers:
        made = Numbers()
        self._functions.hs_arena_stats(self._handle, ctypes.byref(made))
        return made

    @property
    def state(self) -> DeviceState | None:
        """None: one of the four calls is at work."""
        number = self._functions.hs_arena_state(self._handle)
        return _STATES[number] if number < len(_STATES) else None

    def lock(self) -> None:
        """RUNNING -> LOCKED. This and the next three raise VacateError."""
        self._do("lock")

    def checkpoint(self) -> int:
        """LOCKED -> CHECKPOINTED; returns the bytes that are free now."""
        freed = ctypes.c_int64()
        self._check(
            "checkpoint", self._functions.hs_arena_checkpoint(self._handle, ctypes.byref(freed))
        )
        return freed.value

    def restore(self) -> None:
        """CHECKPOINTED -> LOCKED; may be called again after a failure, and goes on there."""
        self._do("restore")

    def unlock(self) -> None:
        """LOCKED -> RUNNING."""
        self._do("unlock")

    def abandon(self) -> bool:
        """Give up a lock, or a copy, that hangs: the state is as it was. False: too late."""
        return bool(self._functions.hs_arena_abandon(self._handle) == 0)

    def spill_to(self, fd: int) -> None:
        """Copy to this file, which stays the caller's; -1: to memory.

        Raises:
            VacateError: the memory is away.
        """
        self._check("spill", self._functions.hs_arena_spill(self._handle, fd))

    def _do(self, verb: str) -> None:
        self._check(verb, getattr(self._functions, f"hs_arena_{verb}")(self._handle))

    def _check(self, verb: str, result: int) -> None:
        if result == 0:
            return
        numbers = self.numbers
        failed = (numbers.failed or b"").decode()
        where = f" in {failed}()" if failed and result not in (-errno.EPROTO, -errno.EBUSY) else ""
        why = _ANSWERS.get(result) or (numbers.why or b"").decode() or os.strerror(-result)
        raise VacateError(f"the arena's {verb} failed{where}: {why}")


def why_not_buildable(environ: Mapping[str, str]) -> str:
    """Why a process here could not get the library; empty if it could. Without importing torch, so
    that a site's library counts whichever torch it is for."""
    site = environ.get(SITE_DIR_ENV)
    if site and any(Path(site).glob(f"*/{RECIPE.library}")):
        return ""
    try:
        find_compiler(environ, RECIPE)
    except NoCompiler as error:
        return str(error)
    return ""


def load() -> Library:
    """The library of this process, built in seconds where there is none yet.

    Raises:
        NoCompiler: it has to be built, and there is no C++ compiler.
        GateError: it can neither be built, trusted nor loaded.
    """
    with build.to_load(RECIPE) as found:
        return Library(found.path)


def self_test(path: str) -> None:
    """Take a tensor's memory away and bring it back; for a process of its own, which may crash.

    Raises:
        GateSelfTestFailed: nothing was freed, or the bits or the address have changed.
    """
    import torch

    arena = Library(Path(path)).serve_cpu()
    tensor = torch.arange(1 << 20)
    at, wanted = tensor.data_ptr(), hash(tensor.numpy().tobytes())
    arena.lock()
    freed_bytes = arena.checkpoint()
    arena.restore()
    arena.unlock()
    if freed_bytes < tensor.nbytes or tensor.data_ptr() != at:
        raise GateSelfTestFailed(f"{freed_bytes} of {tensor.nbytes} bytes were freed")
    if hash(tensor.numpy().tobytes()) != wanted:
        raise GateSelfTestFailed("a tensor has come back with other bits")

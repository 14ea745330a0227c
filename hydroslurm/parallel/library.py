"""The binding of ``native/host_reduce.h``, built where it is used as the gate is."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from hydroslurm.errors import GateError
from hydroslurm.gate import build
from hydroslurm.gate.compiler import Recipe, abi_number

RECIPE = Recipe(
    what="the library of sums on the host",
    library="hs_host_reduce.so",
    sources=Path(__file__).parent / "native",
    abi_of="host_reduce.h",
    self_test="hydroslurm.parallel.self_test",
    with_torch=False,
    # the same bits on every processor: no multiplication is fused with an addition
    flags=("-O3", "-ffp-contract=off"),
)
TYPES = {torch.float32: 1, torch.float64: 2, torch.bfloat16: 3, torch.float16: 4}


class Library:
    """The functions, and Python's types for theirs. Each gives up the GIL while it runs."""

    def __init__(self, path: Path) -> None:
        """Load it.

        Raises:
            GateError: it cannot be loaded, or is of another ABI.
        """
        try:
            self._functions = functions = ctypes.CDLL(str(path))
            found = functions.hs_reduce_abi()
            word, address = ctypes.c_void_p, ctypes.c_void_p
            functions.hs_reduce_wait.argtypes = [word, ctypes.c_uint32, word, ctypes.c_int64]
            functions.hs_reduce_count.argtypes = [word, ctypes.c_uint32]
            functions.hs_reduce_fail.argtypes = [
                *(word, ctypes.c_uint32, word, ctypes.c_int, ctypes.c_int)
            ]
            functions.hs_reduce_sum.argtypes = [
                *(address, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
                *(ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_double),
            ]
        except (OSError, AttributeError) as error:
            raise GateError(f"{RECIPE.what} {path} cannot be loaded: {error}") from error
        if found != abi_number(RECIPE):
            raise GateError(
                f"{path} has ABI {found}, wanted {abi_number(RECIPE)}; remove it and let it be "
                "rebuilt"
            )

    def wait(self, word: int, target: int, *, failed: int, slice_s: float) -> bool:
        """Wait at most ``slice_s`` for a counter (an address); True: it is there.

        Raises:
            InterruptedError: the node has failed.
        """
        result = self._functions.hs_reduce_wait(word, target, failed, int(slice_s * 1e9))
        if result == -errno.ECANCELED:
            raise InterruptedError
        return bool(result == 0)

    def count(self, word: int, target: int) -> None:
        """Add 1 to a counter; wakes who waits for ``target`` if that is reached by it."""
        self._functions.hs_reduce_count(word, target)

    def fail(self, failed: int, value: int, *, words: int, count: int, stride: int) -> None:
        """Set the word ``failed`` if it is 0, and wake all."""
        self._functions.hs_reduce_fail(failed, value, words, count, stride)

    def sum(
        self,
        out: int,
        out_type: torch.dtype,
        sources: Sequence[int],
        in_type: torch.dtype,
        *,
        count: int,
        accumulate: torch.dtype,
        scale: float = 1.0,
    ) -> None:
        """``out[i] = scale * sum of the sources[i]``; addresses, and a number of elements."""
        addresses = (ctypes.c_void_p * len(sources))(*sources)
        result = self._functions.hs_reduce_sum(
            *(out, TYPES[out_type], addresses, len(sources), TYPES[in_type], count),
            *(TYPES[accumulate], scale),
        )
        assert result == 0, os.strerror(-result)


@functools.cache
def load() -> Library:
    """The library of this process, built in seconds where there is none yet.

    Raises:
        NoCompiler: it has to be built, and there is no C++ compiler.
        GateError: it can neither be built, trusted nor loaded.
    """
    with build.to_load(RECIPE) as found:
        return Library(found.path)

"""The one observer of all peers: it stamps what a training does, with CLOCK_MONOTONIC, and writes
down which samples each step was trained on.

A script enters an ``Observer`` around its loop and says ``made(step)`` after each step; every
operator is stamped without its help. Beside it runs witness.py, which stamps the signals of the job
step. So nobody measures himself, and what an attempt has done can be read after it was killed: the
stamps lie in a mapped file.
"""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attempts import HEAD, SILENCE
from torch.utils._python_dispatch import TorchDispatchMode

SILENCE_NS = 150_000_000
"""So long without an operator is written down: far more than any step or save takes here."""

_MOST = 500
_SIZE = HEAD.size + _MOST * SILENCE.size
_WITNESS = Path(__file__).with_name("witness.py")


class Observer(TorchDispatchMode):
    """Stamps the operators and steps of one attempt of a training.

    Args:
        folder: of the training; the stamps go into ``folder/attempts``.
        begin: the steps that were done when this attempt began.
        environ: where ``COMPARE_CORE`` names the core to stay on.
    """

    def __init__(
        self, folder: Path, begin: int, *, environ: Mapping[str, str] = os.environ
    ) -> None:
        super().__init__()
        attempts = folder / "attempts"
        attempts.mkdir(parents=True, exist_ok=True)
        self._path = attempts / f"attempt-{len(list(attempts.glob('attempt-*.bin'))):05d}.bin"
        self._core = environ.get("COMPARE_CORE")
        self._begin = self._step = begin
        self._samples: list[int] = []
        self._first_step_ns = self._step_ns = self._operator_ns = self._count = 0

    def __enter__(self) -> Observer:
        signals = str(self._path.with_suffix(".signals"))
        witness = [sys.executable, "-I", "-S", str(_WITNESS), signals]
        self._witness = subprocess.Popen(witness, stdin=subprocess.DEVNULL)
        if self._core is not None:
            os.sched_setaffinity(0, {int(self._core)})
        part = self._path.with_suffix(".part")
        with part.open("wb+") as file:
            file.truncate(_SIZE)
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._began_ns = self._operator_ns = time.monotonic_ns()
        self._write()
        part.rename(self._path)
        self._seen = self._path.with_suffix(".samples").open("w", buffering=1)
        self._hook = torch.nn.modules.module.register_module_forward_pre_hook(self._see)
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._hook.remove()
        self._seen.close()
        self._witness.kill()
        self._witness.wait()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        begin_ns = time.monotonic_ns()
        if begin_ns - self._operator_ns > SILENCE_NS:
            self._silent(self._operator_ns, begin_ns)
        result = func(*args, **(kwargs or {}))
        self._operator_ns = time.monotonic_ns()
        if self._operator_ns - begin_ns > SILENCE_NS:  # held at the same operator, one level down
            self._silent(begin_ns, self._operator_ns)
        struct.pack_into("<q", self._map, 40, self._operator_ns)
        return result

    def made(self, step: int) -> None:
        """Say that a step is complete."""
        self._step, self._step_ns = step, time.monotonic_ns()
        self._first_step_ns = self._first_step_ns or self._step_ns
        self._write()
        print(step, *self._samples, file=self._seen)
        self._samples = []

    def _see(self, module: torch.nn.Module, inputs: Any) -> None:
        """The outermost module is called first."""
        if module.training and not self._samples and inputs:
            self._samples = [zlib.crc32(row.tobytes()) for row in inputs[0].numpy()]

    def _silent(self, begin_ns: int, end_ns: int) -> None:
        if self._count < _MOST:
            at = HEAD.size + self._count * SILENCE.size
            SILENCE.pack_into(self._map, at, begin_ns, end_ns)
            self._count += 1
            self._write()

    def _write(self) -> None:
        HEAD.pack_into(
            self._map,
            0,
            self._began_ns,
            self._begin,
            self._step,
            self._first_step_ns,
            self._step_ns,
            self._operator_ns,
            self._count,
        )

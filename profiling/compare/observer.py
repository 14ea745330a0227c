"""The one observer of all peers: it stamps what a training does, with CLOCK_MONOTONIC, and writes
down which samples each step was trained on.

A script enters an ``Observer`` around its loop and says ``made(step)`` after each step; every
operator is stamped without its help. Beside it runs witness.py, which stamps the signals of the job
step. So nobody measures himself, and what an attempt has done can be read after it was killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attempts import AttemptLog
from torch.utils._python_dispatch import TorchDispatchMode

SILENCE_NS = 150_000_000
"""So long without an operator is written down: far more than any step or save takes here."""

_WITNESS = Path(__file__).with_name("witness.py")


class Observer(TorchDispatchMode):
    """Stamps the operators and steps of one attempt of a training."""

    def __init__(
        self, folder: Path, begin: int, *, environ: Mapping[str, str] = os.environ
    ) -> None:
        super().__init__()
        self._log = AttemptLog(folder, begin)
        self._core = environ.get("COMPARE_CORE")
        self._samples: list[int] = []
        self._operator_ns = time.monotonic_ns()

    def __enter__(self) -> Observer:
        witness = [sys.executable, "-I", "-S", str(_WITNESS), str(self._log.path)]
        self._witness = subprocess.Popen(witness, stdin=subprocess.DEVNULL)
        if self._core is not None:
            os.sched_setaffinity(0, {int(self._core)})
        self._hook = torch.nn.modules.module.register_module_forward_pre_hook(self._see)
        self._operator_ns = time.monotonic_ns()
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._hook.remove()
        self._log.close()
        self._witness.kill()
        self._witness.wait()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        begin_ns = time.monotonic_ns()
        if begin_ns - self._operator_ns > SILENCE_NS:
            self._log.write("silence", self._operator_ns, begin_ns)
        result = func(*args, **(kwargs or {}))
        self._operator_ns = time.monotonic_ns()
        if self._operator_ns - begin_ns > SILENCE_NS:  # held at the same operator, one level down
            self._log.write("silence", begin_ns, self._operator_ns)
        return result

    def made(self, step: int) -> None:
        """Say that a step is complete."""
        self._log.made(step, *self._samples)
        self._samples = []

    def _see(self, module: torch.nn.Module, inputs: Any) -> None:
        """The outermost module is called first."""
        if module.training and not self._samples and inputs:
            self._samples = [zlib.crc32(row.tobytes()) for row in inputs[0].numpy()]

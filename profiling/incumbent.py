"""The incumbent's way to pause (HydroJobSche), rebuilt for comparison; nothing else uses it.

Faithful in what costs time and in what is missed:

- four calls per leaf module and step: Python hooks before and after its forward, and before and
  after its backward through two autograd Functions, which pass each tensor through ``detach`` (so
  they come from PatrickStar and ColossalAI);
- ``while state == 0: sleep(0.001)`` in each of them;
- handlers by ``signal.signal`` for SIGUSR1 and SIGUSR2, which CPython calls between two bytecodes
  of the main thread.

Ours are only the two stamps around the loop, taken for the measurement.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from hydroslurm.core.events import EventKind

PAUSED, RUNNING = 0, 1


class Incumbent:
    """Installed on one model, in the main thread.

    Attributes:
        on_stamp: told what has happened, and CLOCK_MONOTONIC in nanoseconds.
    """

    def __init__(
        self, model: nn.Module, *, on_stamp: Callable[[EventKind, int], None] | None = None
    ):
        self.state = RUNNING
        self.on_stamp = on_stamp
        self._handles: list[Any] = []
        self._previous: dict[int, Any] = {}
        self._model = model

    def __enter__(self) -> Incumbent:
        for module in self._model.modules():
            if not list(module.children()) and list(module.parameters()):
                self._handles.append(module.register_forward_pre_hook(self._before))
                self._handles.append(module.register_forward_hook(self._after))
        for signo in (signal.SIGUSR1, signal.SIGUSR2):
            self._previous[signo] = signal.signal(signo, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for signo, handler in self._previous.items():
            signal.signal(signo, handler)

    def _on_signal(self, signo: int, _frame: FrameType | None) -> None:
        self.state = PAUSED if signo == signal.SIGUSR1 else RUNNING

    def _wait(self) -> None:
        if self.state == RUNNING:
            return
        self._stamp(EventKind.FIRST_OPERATOR_HELD)
        while self.state == PAUSED:
            time.sleep(0.001)
        self._stamp(EventKind.FIRST_OPERATOR_RELEASED)

    def _stamp(self, what: EventKind) -> None:
        if self.on_stamp is not None:
            self.on_stamp(what, time.monotonic_ns())

    def _before(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self._wait()
        return tuple(self._through(value) for value in args)

    def _after(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        self._wait()
        return self._through(output)

    def _through(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _Waits.apply(self._wait, value)
        return value


class _Waits(torch.autograd.Function):
    """On a module's input its backward runs after the module's, on an output before it."""

    @staticmethod
    def forward(ctx: Any, wait: Callable[[], None], value: torch.Tensor) -> torch.Tensor:
        ctx.wait = wait
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.wait()
        return (None, *gradients)

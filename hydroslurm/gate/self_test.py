"""Does a library that was just built hold operators? Run as a program of its own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

from hydroslurm.core.events import EventKind
from hydroslurm.errors import GateSelfTestFailed
from hydroslurm.gate.native_gate import NativeGate
from hydroslurm.gate.protocol import Action, Cause


def self_test(library: Path) -> None:
    """Hold this thread at an operator and let it go again; for a process of its own.

    Raises:
        GateError: it does not hold, does not let go, or changes a result.
    """
    import torch

    gate = NativeGate(library)
    gate.start([])
    gate.request(Action.PAUSE, Cause.API)
    seen: list[EventKind] = []
    # asleep while it starts the helper, this thread may count as parked before it is held
    held = {EventKind.FIRST_OPERATOR_HELD, EventKind.LATE_OPERATOR_HELD}

    def read_until(done: Callable[[], bool]) -> None:
        while not done():
            seen.extend(event.kind for event in gate.wait_events(1.0))

    def resume_when_held() -> None:
        read_until(lambda: EventKind.PARKED in seen and not held.isdisjoint(seen))
        gate.request(Action.RESUME, Cause.API)

    read_until(lambda: EventKind.GATE_CLOSED in seen)
    helper = threading.Thread(target=resume_when_held)
    helper.start()
    total = torch.ones(3, requires_grad=True).sum()
    total.backward()  # type: ignore[no-untyped-call]
    helper.join()
    read_until(lambda: EventKind.FIRST_OPERATOR_RELEASED in seen)
    gate.stop()
    if EventKind.RESUMED not in seen or float(total.detach()) != 3.0:
        raise GateSelfTestFailed(
            f"saw {seen}, and {float(total.detach())} for the sum of three ones"
        )


if __name__ == "__main__":
    self_test(Path(sys.argv[1]))

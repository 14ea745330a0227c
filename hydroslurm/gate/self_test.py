"""Self-test of a new library: does it hold operators? Runs in a child, in case it crashes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hydroslurm.core.events import EventKind
from hydroslurm.core.threads import thread
from hydroslurm.errors import GateSelfTestFailed
from hydroslurm.gate.protocol import Action, Cause

TIMEOUT_S = 180.0


def self_test_in_child(library: Path) -> None:
    """Let a child process hold and release an operator with a library.

    Raises:
        GateSelfTestFailed: it fails; the message has the child's output.
    """
    # `python -m` would first search the working directory, which others may write
    program = (
        "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv.pop(1)]; "
        "from hydroslurm.gate.self_test import self_test; self_test(sys.argv[1])"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parents[2]), str(library)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise GateSelfTestFailed(
            f"the self-test of the native gate did not end in {TIMEOUT_S:.0f} s"
        ) from error
    if done.returncode != 0:
        raise GateSelfTestFailed(
            f"the native gate was built, but its self-test ended with {done.returncode}: "
            f"{(done.stderr or done.stdout).strip()[-1000:]}"
        )


def self_test(library: str) -> None:
    """Hold this thread at an operator and release it; call it in a process of its own.

    Raises:
        GateError: it does not hold, does not release, or changes a result.
    """
    import torch

    from hydroslurm.gate.native_gate import NativeGate

    gate = NativeGate(Path(library))
    gate.start([])
    gate.request(Action.PAUSE, Cause.API)
    seen: list[EventKind] = []
    # while this thread sleeps to start the helper, it may count as parked before it is held
    held = {EventKind.FIRST_OPERATOR_HELD, EventKind.LATE_OPERATOR_HELD}

    def read_until(done: Callable[[], bool]) -> None:
        while not done():
            seen.extend(event.kind for event in gate.wait_events(1.0))

    def resume_when_held() -> None:
        read_until(lambda: EventKind.PARKED in seen and not held.isdisjoint(seen))
        gate.request(Action.RESUME, Cause.API)

    read_until(lambda: EventKind.GATE_CLOSED in seen)
    helper = thread(resume_when_held, name="hydroslurm-self-test", daemon=False)
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

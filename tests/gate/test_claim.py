"""Taking the stop signals over, with both gates."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from zygote import forked

PROGRAM = """
    import os, signal, sys
    import hydroslurm

    def mine(signo, frame):
        print("mine", signal.Signals(signo).name, flush=True)

    if "handled" in sys.argv:
        signal.signal(signal.SIGTERM, mine)
    controller = hydroslurm.install(gate=sys.argv[1], run_dir="run")
    if "claim" in sys.argv:
        controller.claim_stops(lambda stop: print("stop", stop.signal, flush=True))
    if "release" in sys.argv:
        controller.release_stops()
    print("ready", flush=True)
    for line in sys.stdin:
        if line == "uninstall\\n":
            hydroslurm.uninstall()
        print("request", controller.stop_request and controller.stop_request.signal, flush=True)
"""


pytestmark = pytest.mark.parametrize("gate", ["native", "hooks"])


def test_a_claimed_signal_asks_for_a_stop(gate: str, tmp_path: Path) -> None:
    """Whoever claims the stops answers for them: the first signal counts, also one that ended
    nobody before; the two SIGTERMs that Slurm sends behind it change nothing and kill nobody; the
    handler of others stays silent until the end."""
    with forked(PROGRAM, tmp_path, gate, "claim", "handled") as program:
        program.expect("ready")
        program.signal(signal.SIGURG)
        assert program.expect("stop") == "SIGURG"
        program.signal(signal.SIGTERM)
        program.signal(signal.SIGTERM)
        program.say("state")
        assert program.expect("request") == "SIGURG"
        program.say("uninstall")
        program.expect("request")
        program.signal(signal.SIGTERM)
        assert program.expect("mine") == "SIGTERM"
        assert program.lines.count("mine SIGTERM") == 1


@pytest.mark.parametrize("options", [(), ("claim", "release"), ("claim", "release", "handled")])
def test_without_a_claim_sigterm_is_as_ever(
    gate: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    """Nobody claimed, or gave it back: SIGTERM does what it always did, SIGURG nothing."""
    with forked(PROGRAM, tmp_path, gate, *options) as program:
        program.expect("ready")
        program.signal(signal.SIGURG)
        program.say("state")
        assert program.expect("request") == "None"
        program.signal(signal.SIGTERM)
        if "handled" in options:
            assert program.expect("mine") == "SIGTERM"
        else:
            assert program.wait() == -signal.SIGTERM

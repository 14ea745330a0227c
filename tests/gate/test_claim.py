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


@pytest.fixture(params=["native", "hooks"])
def gate(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("signo", [signal.SIGTERM, signal.SIGURG])
def test_claimed_signal_asks_for_a_stop(gate: str, signo: signal.Signals, tmp_path: Path) -> None:
    """A signal that nobody handled is a stop once claimed, and the process lives on."""
    with forked(PROGRAM, tmp_path, gate, "claim") as program:
        program.expect("ready")
        program.signal(signo)
        assert program.expect("stop") == signo.name
        program.say("state")
        assert program.expect("request") == signo.name


def test_handlers_of_others_are_not_called(gate: str, tmp_path: Path) -> None:
    """Whoever claims the stops answers for them: the old handler stays silent until the release."""
    with forked(PROGRAM, tmp_path, gate, "claim", "handled") as program:
        program.expect("ready")
        program.signal(signal.SIGTERM)
        assert program.expect("stop") == "SIGTERM"
        program.say("uninstall")
        program.expect("request")
        program.signal(signal.SIGTERM)
        assert program.expect("mine") == "SIGTERM"
        assert program.lines.count("mine SIGTERM") == 1


def test_first_of_two_stops_counts(gate: str, tmp_path: Path) -> None:
    """Slurm sends two SIGTERMs: the second changes nothing and kills nobody."""
    with forked(PROGRAM, tmp_path, gate, "claim") as program:
        program.expect("ready")
        program.signal(signal.SIGURG)
        program.expect("stop")
        program.signal(signal.SIGTERM)
        program.signal(signal.SIGTERM)
        program.say("state")
        assert program.expect("request") == "SIGURG"


@pytest.mark.parametrize("options", [(), ("claim", "release")])
def test_without_a_claim_sigterm_ends_the_process(
    gate: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    """Nobody claimed, or gave it back: SIGTERM does what it always did, SIGURG nothing."""
    with forked(PROGRAM, tmp_path, gate, *options) as program:
        program.expect("ready")
        program.signal(signal.SIGURG)
        program.say("state")
        assert program.expect("request") == "None"
        program.signal(signal.SIGTERM)
        assert program.wait() == -signal.SIGTERM


def test_released_handler_is_called_again(gate: str, tmp_path: Path) -> None:
    """After the release the handler of the user is chained as before."""
    with forked(PROGRAM, tmp_path, gate, "claim", "release", "handled") as program:
        program.expect("ready")
        program.signal(signal.SIGTERM)
        assert program.expect("mine") == "SIGTERM"

"""A real training process, real signals: it parks, it answers, it goes on, and its result is the
same."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Child, child, cpu_s, wait_until
from zygote import forked

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import RankStatus, read_status
from hydroslurm.errors import TargetError
from hydroslurm.runtime import client

TRAIN = """
    import hashlib, os, signal, sys, threading, torch
    import hydroslurm

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    run_dir = sys.argv[1] if len(sys.argv) > 1 else None
    engine = hydroslurm.od_execution_wrapper(model, run_dir=run_dir)
    if status := os.environ.get("SIGTERM_STATUS"):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(status)))
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.05, momentum=0.9)
    data = torch.randn(256, 64)
    print("ready", hydroslurm.controller().gate.name)
    limit = int(sys.argv[2]) if len(sys.argv) > 2 else 10**9
    step = 0

    def listen():  # a line ends the training some steps later
        global limit
        if sys.stdin.readline():
            limit = step + 100

    threading.Thread(target=listen, daemon=True).start()
    while step < limit:
        optimizer.zero_grad()
        engine(data).square().mean().backward()
        optimizer.step()
        step += 1
        hydroslurm.set_step(step)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in engine.parameters()))
    print("steps", step)
    print("hash", digest.hexdigest())
"""


@pytest.fixture
def rank(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Child]:
    """A process that trains for ever, with its events in tmp_path/run. Its parameter is the
    gate."""
    gate = getattr(request, "param", "native")
    environ = {"HYDROSLURM_GATE": gate}
    with forked(TRAIN, tmp_path, str(tmp_path / "run"), environ=environ) as trainer:
        assert trainer.expect("ready") == gate
        yield trainer


HELD = (EventKind.FIRST_OPERATOR_HELD, EventKind.LATE_OPERATOR_HELD)
with_both_gates = pytest.mark.parametrize("rank", ["native", "hooks"], indirect=True)


def _events(tmp_path: Path) -> list[Event]:
    return list(read_events(RunDir(tmp_path / "run").rank_events(0)))


def _status(tmp_path: Path) -> RankStatus:
    state = read_status(RunDir(tmp_path / "run").rank_status(0))
    assert state is not None
    return state


@with_both_gates
def test_pause_and_resume_by_the_users_signals(rank: Child, tmp_path: Path) -> None:
    """USR1 parks and USR2 continues, both acknowledged with a latency, and every event is written.
    While parked the process burns no processor time, and its step does not move."""
    parked = client.pause(rank.pid)
    assert parked.done
    assert "parked after" in parked.message
    before_s, step = cpu_s(rank.pid), _status(tmp_path).step
    time.sleep(1.0)  # the thing itself is measured over a second of parking
    assert round(cpu_s(rank.pid) - before_s, 2) <= 0.02
    resumed = client.resume(rank.pid)
    assert resumed.done
    assert "running again after" in resumed.message
    events = _events(tmp_path)
    # a thread that waits for the GIL counts as asleep: it may be held when the rank has parked
    (held,) = [event for event in events if event.kind in HELD]
    assert held.data["operator"]
    installed, _, _, parked, *_ = rest = [event for event in events if event is not held]
    wanted = [
        EventKind.INSTALLED,
        EventKind.SIGNAL_RECEIVED,
        EventKind.GATE_CLOSED,
        EventKind.PARKED,
        EventKind.SIGNAL_RECEIVED,
        EventKind.RESUMED,
        EventKind.FIRST_OPERATOR_RELEASED,
    ]
    assert [event.kind for event in rest] == wanted
    assert events.index(held) in (3, 4)
    assert parked.step == step
    assert ("module" in installed.data["granularity"]) == (installed.data["gate"] == "hooks")
    stamps = [event.mono_ns for event in events[1:5]]
    assert stamps == sorted(stamps)


@with_both_gates
def test_sigcont_ends_only_what_slurm_began(rank: Child, tmp_path: Path) -> None:
    """A rank that a person paused stays parked through Slurm's TSTP and CONT."""
    client.pause(rank.pid)
    rank.signal(signal.SIGTSTP)
    wait_until(lambda: {*_status(tmp_path).causes} == {"slurm", "user"}, "both causes in force")
    rank.signal(signal.SIGCONT)
    wait_until(lambda: _status(tmp_path).causes == ("user",), "only the person's cause is left")
    assert _status(tmp_path).state == "parked"
    assert client.resume(rank.pid).done
    wait_until(lambda: _status(tmp_path).state == "running", "running")


@with_both_gates
def test_ten_thousand_signals_end_in_the_last_ones_state(rank: Child, tmp_path: Path) -> None:
    """A storm of pauses and resumes neither kills nor wedges: the last one counts."""
    for signo in itertools.islice(itertools.cycle((signal.SIGUSR1, signal.SIGUSR2)), 10_000):
        rank.signal(signo)
    # what is pending together is delivered lowest number first, so let the storm arrive before
    caught = Path(f"/proc/{rank.pid}/status")
    wait_until(lambda: "ShdPnd:\t0000000000000000" in caught.read_text(), "no signal is pending")
    # where the handlers are Python's, the last of the storm may be called behind this one's
    wait_until(lambda: client.pause(rank.pid).done, "a pause in force")
    wait_until(lambda: _status(tmp_path).state == "parked", "the last signal, a pause, is in force")
    assert client.resume(rank.pid).done
    assert rank.process.poll() is None


@pytest.mark.parametrize(
    ("signo", "handler", "status"),
    [
        (signal.SIGINT, "", -signal.SIGINT),
        (signal.SIGTERM, "", -signal.SIGTERM),
        (signal.SIGTERM, "9", 9),
    ],
)
def test_a_parked_rank_can_be_ended(signo: int, handler: str, status: int, tmp_path: Path) -> None:
    """SIGINT ends every pause, so that Python can raise KeyboardInterrupt; so does SIGTERM where
    the script has a handler, which it may have set after us. Its default action stays."""
    environ = {"SIGTERM_STATUS": handler, "HYDROSLURM_HEARTBEAT_S": "0.1"}
    with forked(TRAIN, tmp_path, str(tmp_path / "run"), environ=environ) as rank:
        rank.expect("ready")
        wait_until(lambda: _status(tmp_path).step, "the first step")
        client.pause(rank.pid)
        wait_until(lambda: _status(tmp_path).state == "parked", "parked")
        rank.signal(signo)
        assert rank.wait() == status, str(rank)
        if signo == signal.SIGINT:
            wait_until(lambda: "KeyboardInterrupt" in str(rank), "its traceback")


@pytest.mark.parametrize(
    ("gate", "pauses"),
    [("native", 50), ("hooks", 20), pytest.param("native", 1000, marks=pytest.mark.long)],
)
def test_many_pauses_change_no_bit(gate: str, pauses: int, tmp_path: Path) -> None:
    """Final weights are bit-identical with and without pauses."""
    (tmp_path / "paused").mkdir()
    environ = {"HYDROSLURM_GATE": gate}
    with forked(TRAIN, tmp_path / "paused", str(tmp_path / "run"), environ=environ) as paused:
        assert paused.expect("ready") == gate
        for _ in range(pauses):
            assert client.pause(paused.pid).done
            assert client.resume(paused.pid).done
        paused.say("enough")
        steps = paused.expect("steps")
        changed = paused.expect("hash")
    kinds = [event.kind for event in _events(tmp_path)]
    assert kinds.count(EventKind.PARKED) == pauses
    assert EventKind.EVENTS_DROPPED not in kinds
    (tmp_path / "bare").mkdir()
    with forked(TRAIN, tmp_path / "bare", str(tmp_path / "a"), steps) as bare:
        bare.expect("ready")
        assert bare.expect("hash") == changed


@pytest.mark.parametrize(
    ("handler", "words"),
    [("SIG_DFL", "would kill it"), ("lambda *_: print('saves and requeues')", "not hydroslurm's")],
)
def test_a_process_that_does_not_listen_is_not_signalled(
    handler: str, words: str, tmp_path: Path
) -> None:
    """USR1 is never sent to a process in which hydroslurm is not installed: it would be killed, or
    do something else than pause, as one with a handler like Lightning's."""
    program = f"from signal import *; signal(SIGUSR1, {handler}); print('ready'); input()"
    with child(program, tmp_path) as other:
        other.expect("ready")
        with pytest.raises(TargetError, match=words):
            client.send_signal(other.pid, "pause")
        with pytest.raises(TargetError, match="not signalled"):
            client.pause(other.pid)
        other.say("")
        assert other.wait() == 0
        assert "saves and requeues" not in str(other)


def test_a_process_that_is_gone_is_an_error(tmp_path: Path) -> None:
    """The message names the process that is not there."""
    with child("pass", tmp_path) as ended:
        ended.wait()
        with pytest.raises(TargetError, match="no process"):
            client.send_signal(ended.pid, "pause")
        with pytest.raises(TargetError, match="no process"):
            client.pause(ended.pid)

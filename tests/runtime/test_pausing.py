"""A real training process, real signals: it parks, it answers, it goes on, and its result is the
same."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Child, child, wait_until
from zygote import forked

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import read_status
from hydroslurm.errors import TargetError
from hydroslurm.runtime import client

sys.path.insert(0, str(Path(__file__).parent))
from programs import TRAIN


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Child]:
    """A process that trains for ever, with its events in tmp_path/run."""
    with forked(TRAIN, tmp_path, str(tmp_path / "run")) as trainer:
        trainer.expect("ready")
        yield trainer


def _events(tmp_path: Path) -> list[Event]:
    return list(read_events(RunDir(tmp_path / "run").rank_events(0)))


def _kinds(tmp_path: Path) -> list[EventKind]:
    return [event.kind for event in _events(tmp_path)]


def _step(pid: int, tmp_path: Path) -> int:
    state = read_status(RunDir(tmp_path / "run").rank_status(0))
    assert state is not None
    return state.step or 0


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_pause_and_resume_by_the_users_signals(rank: Child, tmp_path: Path) -> None:
    """USR1 parks and USR2 continues, both acknowledged with a latency, and every event is
    written."""
    parked = client.pause(rank.pid)
    assert parked.done
    assert parked.latency_us is not None
    resumed = client.resume(rank.pid)
    assert resumed.done
    assert resumed.latency_us is not None
    kinds = _kinds(tmp_path)
    wanted = [
        EventKind.INSTALLED,
        EventKind.SIGNAL_RECEIVED,
        EventKind.GATE_CLOSED,
        EventKind.FIRST_OPERATOR_HELD,
        EventKind.PARKED,
        EventKind.SIGNAL_RECEIVED,
        EventKind.RESUMED,
        EventKind.FIRST_OPERATOR_RELEASED,
    ]
    assert kinds == wanted
    stamps = [event.mono_ns for event in _events(tmp_path)[1:5]]
    assert stamps == sorted(stamps)


def test_a_parked_rank_uses_no_processor(rank: Child, tmp_path: Path) -> None:
    """While parked the process burns no CPU time, and its step does not move."""
    client.pause(rank.pid)
    before, step = _cpu_ticks(rank.pid), _step(rank.pid, tmp_path)
    time.sleep(1.0)  # the thing itself is measured over a second of parking
    assert _cpu_ticks(rank.pid) - before <= 2  # ticks of 10 ms
    client.resume(rank.pid)
    client.pause(rank.pid)
    assert _step(rank.pid, tmp_path) >= step


def test_sigcont_ends_only_what_slurm_began(rank: Child, tmp_path: Path) -> None:
    """A rank that a person paused stays parked through Slurm's TSTP and CONT."""
    client.pause(rank.pid)
    rank.signal(signal.SIGTSTP)
    path = RunDir(tmp_path / "run").rank_status(0)
    wait_until(
        lambda: set(read_status(path).causes) == {"slurm", "user"},
        "both causes in force",
    )
    rank.signal(signal.SIGCONT)
    wait_until(lambda: read_status(path).causes == ("user",), "only the person's cause is left")
    assert read_status(path).state == "parked"
    assert client.resume(rank.pid).done
    wait_until(lambda: read_status(path).state == "running", "running")


def test_a_suspend_longer_than_the_grace_is_survived(rank: Child, tmp_path: Path) -> None:
    """TSTP, then SIGSTOP for a while, then CONT, as Slurm does it: the rank goes on where it
    was."""
    path = RunDir(tmp_path / "run").rank_status(0)
    for _ in range(3):
        rank.signal(signal.SIGTSTP)
        wait_until(lambda: read_status(path).state == "parked", "parked")
        rank.signal(signal.SIGSTOP)
        wait_until(
            lambda: Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T",
            "stopped",
        )
        time.sleep(0.3)
        rank.signal(signal.SIGCONT)
        wait_until(lambda: read_status(path).state == "running", "running")
    pauses = [e for e in _events(tmp_path) if e.kind is EventKind.RESUMED]
    assert len(pauses) == 3
    assert all(e.data["parked_s"] >= 0.3 for e in pauses)


def test_resume_of_a_running_rank_says_so(rank: Child) -> None:
    """A resume with nothing to resume is answered, not waited for in vain."""
    answer = client.resume(rank.pid)
    assert answer.done
    assert "running already" in answer.message


def test_second_pause_of_a_parked_rank_says_so(rank: Child) -> None:
    """A pause of a parked rank is answered as held already."""
    client.pause(rank.pid)
    answer = client.pause(rank.pid)
    assert answer.done
    assert "already" in answer.message


def test_ten_thousand_signals_end_in_the_last_ones_state(rank: Child, tmp_path: Path) -> None:
    """A storm of pauses and resumes neither kills nor wedges: the last one counts."""
    for signo in itertools.islice(itertools.cycle((signal.SIGUSR1, signal.SIGUSR2)), 10_000):
        rank.signal(signo)
    # what is pending together is delivered lowest number first, so let the storm arrive before
    caught = Path(f"/proc/{rank.pid}/status")
    wait_until(lambda: "ShdPnd:\t0000000000000000" in caught.read_text(), "no signal is pending")
    assert client.pause(rank.pid).done
    path = RunDir(tmp_path / "run").rank_status(0)
    wait_until(
        lambda: read_status(path).state == "parked",
        "the last signal, a pause, is in force",
    )
    assert client.resume(rank.pid).done
    assert rank.process.poll() is None


def test_ctrl_c_gets_out_of_a_pause(rank: Child) -> None:
    """SIGINT ends every pause, so that Python can raise KeyboardInterrupt."""
    client.pause(rank.pid)
    rank.signal(signal.SIGINT)
    assert rank.wait() != 0
    wait_until(lambda: any("KeyboardInterrupt" in line for line in rank.lines), "its traceback")


def test_sigterm_without_a_handler_still_ends_a_parked_rank(rank: Child) -> None:
    """The default action of SIGTERM is left alone, parked or not."""
    client.pause(rank.pid)
    rank.signal(signal.SIGTERM)
    assert rank.wait() == -signal.SIGTERM


def test_a_thousand_pauses_change_no_bit(tmp_path: Path) -> None:
    """Final weights are bit-identical with and without 1,000 pauses."""
    (tmp_path / "paused").mkdir()
    with forked(TRAIN, tmp_path / "paused", str(tmp_path / "run")) as paused:
        paused.expect("ready")
        for _ in range(1000):
            assert client.pause(paused.pid).done
            assert client.resume(paused.pid).done
        paused.say("enough")
        steps = paused.expect("steps")
        changed = paused.expect("hash")
    kinds = _kinds(tmp_path)
    assert kinds.count(EventKind.PARKED) == 1000
    assert EventKind.EVENTS_DROPPED not in kinds
    (tmp_path / "bare").mkdir()
    with forked(TRAIN, tmp_path / "bare", str(tmp_path / "a"), steps) as bare:
        bare.expect("ready")
        assert bare.expect("hash") == changed


def test_a_process_that_does_not_listen_is_not_killed(tmp_path: Path) -> None:
    """USR1 is never sent to a process in which hydroslurm is not installed."""
    with child("print('ready', flush=True); input()", tmp_path) as other:
        other.expect("ready")
        with pytest.raises(TargetError, match="would kill it"):
            client.send_signal(other.pid, "pause")
        with pytest.raises(TargetError, match="not signalled"):
            client.pause(other.pid)
        other.say("")
        assert other.wait() == 0


OWN_HANDLER = """
import signal
signal.signal(signal.SIGUSR1, lambda *_: print("saves and requeues", flush=True))
"""


def test_a_handler_of_somebody_else_is_not_called(tmp_path: Path) -> None:
    """A process that has a handler of its own for USR1, as Lightning does, is not signalled: it
    would do something else than pause."""
    with child(OWN_HANDLER + "print('ready', flush=True); input()", tmp_path) as other:
        other.expect("ready")
        with pytest.raises(TargetError, match="not hydroslurm's"):
            client.send_signal(other.pid, "pause")
        other.say("")
        assert other.wait() == 0
        assert "saves and requeues" not in str(other)


def test_a_handler_that_came_over_ours_is_seen_and_not_called(tmp_path: Path) -> None:
    """What was installed after hydroslurm is found by the rank itself, and the client believes
    it."""
    theirs = OWN_HANDLER.strip().replace("\n", "\n    ")
    code = TRAIN.replace('print("ready"', f'{theirs}\n    print("ready"', 1)
    assert code != TRAIN
    with child(code, tmp_path, str(tmp_path / "run")) as trainer:
        trainer.expect("ready")
        wait_until(lambda: EventKind.HANDLER_REPLACED in _kinds(tmp_path), "it is seen")
        with pytest.raises(TargetError, match="replaced since"):
            client.pause(trainer.pid)
        assert "saves and requeues" not in str(trainer)


def test_a_process_that_is_gone_is_an_error(tmp_path: Path) -> None:
    """The message names the process that is not there."""
    with child("pass", tmp_path) as ended:
        ended.wait()
        with pytest.raises(TargetError, match="no process"):
            client.send_signal(ended.pid, "pause")
        with pytest.raises(TargetError, match="no process"):
            client.pause(ended.pid)


def test_events_that_cannot_be_written_do_not_stop_pausing(tmp_path: Path) -> None:
    """With the run folder's place taken by a file there is one warning, and pauses still hold."""
    (tmp_path / "run").write_text("in the way")
    with forked(TRAIN, tmp_path, str(tmp_path / "run")) as trainer:
        trainer.expect("ready")
        trainer.signal(signal.SIGUSR1)

        def idle() -> bool:
            before = _cpu_ticks(trainer.pid)
            time.sleep(0.3)
            return _cpu_ticks(trainer.pid) - before <= 1

        wait_until(idle, "no processor time is used")
        trainer.signal(signal.SIGUSR2)
        wait_until(lambda: not idle(), "it runs again")
        warned = [line for line in trainer.lines if "its events go into a private folder" in line]
        assert len(warned) == 1


def test_pauses_from_many_threads_at_once(rank: Child) -> None:
    """Clients that pause and resume at the same time leave the rank in a state that one more pair
    settles."""

    def storm() -> None:
        for _ in range(50):
            client.send_signal(rank.pid, "pause")
            client.send_signal(rank.pid, "resume")

    threads = [threading.Thread(target=storm) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.pause(rank.pid).done
    assert client.resume(rank.pid).done


def test_the_fallback_gate_pauses_the_same_program(tmp_path: Path) -> None:
    """With module hooks instead of the native gate the same signals park and resume, and say
    where."""
    environ = {"HYDROSLURM_GATE": "hooks"}
    with forked(TRAIN, tmp_path, str(tmp_path / "run"), environ=environ) as trainer:
        assert trainer.expect("ready") == "hooks"
        for _ in range(5):
            assert client.pause(trainer.pid).done
            before = _cpu_ticks(trainer.pid)
            assert client.resume(trainer.pid).done
            wait_until(lambda b=before: _cpu_ticks(trainer.pid) > b, "it trains again")
    installed = _events(tmp_path)[0]
    assert installed.data["gate"] == "hooks"
    assert "module" in installed.data["granularity"]
    assert _kinds(tmp_path).count(EventKind.PARKED) == 5

"""A real training process is asked to vacate, with a model in the place of CUDA's API: what it
answers, what its status shows, and that nothing opens the gate before its memory is back."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import Child, wait_until
from zygote import forked

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import RankStatus, read_status
from hydroslurm.runtime import client

HERE = Path(__file__).parent

TRAIN = """
    import sys, torch, hydroslurm
    from dataclasses import replace
    from hydroslurm.vacate.communicators import Communicators
    from hydroslurm.vacate.cuda_checkpoint import CONTEXT_BYTES, CudaCheckpoint

    controller = hydroslurm.install(run_dir=sys.argv[1])
    controller.vacating.open_device = lambda: CudaCheckpoint(
        used_bytes=lambda: 10**9 - CONTEXT_BYTES, devices=1, communicators=Communicators(),
        command=[sys.executable, sys.argv[2], sys.argv[3]],
    )
    controller.vacating._limits = replace(controller.vacating._limits, retry_s=0.05)
    if sys.argv[4] == "claims":
        controller.claim_stops()
    model = torch.nn.Linear(32, 32)
    print("ready", flush=True)
    step = 0
    while controller.stop_request is None:
        model.zero_grad()
        model(torch.ones(8, 32)).sum().backward()
        step += 1
        controller.step = step
    print("stopped", open(sys.argv[3] + "/calls").read().split()[-2], flush=True)
"""


class Rank:
    """The process, and what it writes."""

    def __init__(self, process: Child, folder: Path) -> None:
        self.process, self.pid = process, process.pid
        self.run, self.model = RunDir(folder / "run"), folder

    @property
    def status(self) -> RankStatus:
        found = read_status(self.run.rank_status(0))
        assert found is not None
        return found

    def events(self, *kinds: EventKind) -> list[Event]:
        found = read_events(self.run.rank_events(0))
        return [event for event in found if not kinds or event.kind in kinds]

    def state(self) -> str:
        try:
            return (self.model / str(self.pid)).read_text()
        except FileNotFoundError:
            return "running"

    def faults(self, *faults: tuple[str, int, str]) -> None:
        (self.model / "calls").unlink(missing_ok=True)
        (self.model / "faults.json").write_text(json.dumps(faults))

    def trains(self) -> None:
        before = self.status.step or 0
        client.pause(self.pid)
        client.resume(self.pid)
        wait_until(lambda: self.status.step is not None and self.status.step > before, "a step")


Start = Callable[..., Rank]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the process, with an environment of its own."""
    (tmp_path / "faults.json").write_text("[]")
    made = []

    def begin(claims: str = "", **environ: str) -> Rank:
        arguments = (str(tmp_path / "run"), str(HERE / "model.py"), str(tmp_path), claims)
        context = forked(TRAIN, tmp_path, *arguments, environ=environ)
        made.append(context)
        process = context.__enter__()
        process.expect("ready")
        return Rank(process, tmp_path)

    yield begin
    for context in made:
        context.__exit__(*sys.exc_info())


def test_a_pause_that_asks_for_it_vacates(start: Start) -> None:
    """`pause --vacate` answers with the bytes and the seconds; the status shows them while it is
    so; a resume is answered once all is back. The next pause, which does not ask, moves nothing."""
    rank = start()
    answer = client.pause(rank.pid, vacate=True, timeout_s=60)
    assert answer.done, answer.message
    assert answer.vacated_bytes == 10**9
    assert "1.00 GB vacated" in answer.message
    assert rank.state() == "checkpointed"
    wait_until(lambda: rank.status.vacated_bytes == 10**9, "the status")
    assert "on the host" in rank.status.vacated_message
    resumed = client.resume(rank.pid, timeout_s=60)
    assert resumed.done, resumed.message
    assert rank.state() == "running"
    order = [event.kind for event in rank.events()]
    assert order.index(EventKind.VACATED) < order.index(EventKind.RESTORED)
    assert order.index(EventKind.RESTORED) < order.index(EventKind.RESUMED)
    assert client.pause(rank.pid).vacated_bytes is None
    client.resume(rank.pid)
    assert len(rank.events(EventKind.VACATED)) == 1
    assert rank.status.vacated_bytes == 0


def test_a_parked_rank_can_be_asked_later(start: Start) -> None:
    """A plain pause in force is made a vacated one by asking, and asking again after a failure
    tries again."""
    rank = start()
    rank.faults(("lock", 1, "refuse"))
    assert client.pause(rank.pid).done
    failed = client.pause(rank.pid, vacate=True, timeout_s=60)
    assert not failed.done
    assert "not vacated" in failed.message
    wait_until(lambda: "CUDA_ERROR_UNKNOWN" in (rank.status.not_vacated or ""), "the status")
    assert client.pause(rank.pid, vacate=True, timeout_s=60).done
    assert client.resume(rank.pid, timeout_s=60).done


def test_never_is_never(start: Start) -> None:
    """A job that forbids it is paused, and says nothing of its memory before the time is over."""
    rank = start(HYDROSLURM_VACATE="never")
    answer = client.pause(rank.pid, vacate=True, timeout_s=1)
    assert not answer.done
    assert rank.state() == "running"


@pytest.mark.parametrize("how", ["refuse", "fail"])
def test_a_checkpoint_that_fails(how: str, start: Start) -> None:
    """An error without harm is a plain pause that trains on; a device that is lost is told in the
    answer, the status and the events."""
    rank = start()
    rank.faults(("checkpoint", 1, how))
    answer = client.pause(rank.pid, vacate=True, timeout_s=60)
    assert not answer.done
    assert "CUDA_ERROR_UNKNOWN" in answer.message
    wait_until(lambda: rank.status.not_vacated is not None, "the status")
    assert rank.status.is_lost == (how == "fail")
    (told,) = rank.events(EventKind.NOT_VACATED)
    assert told.data.get("lost", False) == (how == "fail")
    if how == "refuse":
        assert client.resume(rank.pid, timeout_s=60).done
        rank.trains()


def test_a_stop_waits_for_the_memory(start: Start) -> None:
    """SIGTERM to a vacated rank: the memory comes back first, and only then the training thread
    goes on to its safe point."""
    rank = start("claims")
    assert client.pause(rank.pid, vacate=True, timeout_s=60).done
    rank.process.signal(signal.SIGTERM)
    assert rank.process.expect("stopped") == "unlock"
    wait_until(lambda: bool(rank.events(EventKind.RESUMED)), "the controller's last lines")
    order = [event.kind for event in rank.events()]
    assert order.index(EventKind.RESTORED) < order.index(EventKind.RESUMED)


def test_a_full_device_keeps_the_rank_parked(start: Start) -> None:
    """Somebody else has the memory at the resume: the rank says so, stays parked, and goes on once
    it is free."""
    rank = start()
    rank.faults(("restore", 1, "refuse"))
    assert client.pause(rank.pid, vacate=True, timeout_s=60).done
    assert client.resume(rank.pid, timeout_s=60).done
    (waited,) = rank.events(EventKind.RESTORE_WAITS)
    assert "CUDA_ERROR_UNKNOWN" in waited.data["reason"]
    assert rank.state() == "running"


def test_too_little_of_the_grace(start: Start) -> None:
    """A suspend of Slurm's that leaves too little time parks, and says how much it would take; a
    person's pause has no such limit."""
    rank = start(HYDROSLURM_VACATE="always", HYDROSLURM_SUSPEND_GRACE_S="0.3")
    rank.process.signal(signal.SIGTSTP)
    wait_until(lambda: bool(rank.events(EventKind.NOT_VACATED)), "the refusal")
    (told,) = rank.events(EventKind.NOT_VACATED)
    assert "suspend_grace_time" in told.data["reason"]
    assert "1.0 GB" in told.data["reason"]
    rank.process.signal(signal.SIGCONT)
    wait_until(lambda: rank.status.state == "running", "running")
    rank.process.signal(signal.SIGUSR1)
    wait_until(lambda: bool(rank.events(EventKind.VACATED)), "vacated")


def test_a_process_without_a_device(tmp_path: Path) -> None:
    """`pause --vacate` of a training on the CPU parks it, and says that there is nothing to give
    back; CUDA's bindings are not imported for that."""
    code = """
        import sys, torch, hydroslurm
        by_torch = "cuda.bindings" in sys.modules  # it does where they are installed
        hydroslurm.install(run_dir=sys.argv[1])
        print("ready", flush=True)
        while sys.argv:
            torch.ones(4).sum()
            if "cuda.bindings" in sys.modules and not by_torch:
                print("imported", flush=True)
    """
    with forked(code, tmp_path, str(tmp_path / "run")) as process:
        process.expect("ready")
        answer = client.pause(process.pid, vacate=True, timeout_s=60)
        assert not answer.done
        assert "no device memory" in answer.message
        assert client.resume(process.pid).done
        assert "imported" not in "".join(process.lines)


ANNOUNCED = """
    import sys, threading, time, torch, hydroslurm
    from hydroslurm.core.events import EventKind
    from hydroslurm.gate.protocol import GateState
    from hydroslurm.vacate.communicators import Communicators
    from hydroslurm.vacate.cuda_checkpoint import CudaCheckpoint

    class Ranks:  # of which this is the only one to be asked
        rank, world_size, have_joined, lost = 0, 1, True, None
        def agree(self, topic, value, **limits): return {0: value}
        def on_gate_event(self, seen): pass
        def leave(self): pass

    controller = hydroslurm.install(run_dir=sys.argv[1])
    controller.vacating.open_device = lambda: CudaCheckpoint(
        used_bytes=lambda: 10**9, devices=1, communicators=Communicators(),
        command=[sys.executable, sys.argv[2], sys.argv[3]],
    )
    controller.ranks = Ranks()
    announced = threading.Event()
    handle = controller._handle
    def late(events):  # a busy machine: the others are quicker than this rank's own thread
        if any(seen.kind is EventKind.GATE_CLOSED for seen in events):
            announced.wait(30)
        handle(events)
    controller._handle = late

    def others(in_flight):
        with controller.exempt():
            for pause, number in enumerate(in_flight, start=1):
                announced.clear()
                controller.pause()
                while controller.state is not GateState.PARKED:
                    time.sleep(0.001)
                data = {"parking": f"{pause}-3", "of_ranks": [0], "in_flight": number}
                controller.record(EventKind.ALL_PARKED, data)
                announced.set()
                print("announced", flush=True)
                sys.stdin.readline()
                controller.resume()
                while controller.state is not GateState.RUNNING:
                    time.sleep(0.001)
            print("done", flush=True)

    thread = threading.Thread(target=others, args=([0, 2, None, 0],), daemon=True)
    model = torch.nn.Linear(8, 8)
    print("ready", flush=True)
    thread.start()
    while thread.is_alive():
        model(torch.ones(8, 8))
"""


def test_an_announcement_that_is_quicker_than_the_ranks_own_thread(tmp_path: Path) -> None:
    """The others may say that all are parked before this rank has written down that its gate has
    closed: it vacates all the same, in the pause of that number. With collectives in flight, or
    where nobody knows, it does not, and says why."""
    (tmp_path / "faults.json").write_text("[]")
    arguments = (str(tmp_path / "run"), str(HERE / "model.py"), str(tmp_path))
    with forked(
        ANNOUNCED, tmp_path, *arguments, environ={"HYDROSLURM_VACATE": "always"}
    ) as process:
        rank = Rank(process, tmp_path)
        process.expect("ready")
        for pause, expected in enumerate(
            (
                EventKind.VACATED,
                EventKind.NOT_VACATED,
                EventKind.NOT_VACATED,
                EventKind.VACATED,
            ),
            start=1,
        ):
            process.expect("announced")
            wait_until(
                lambda kind=expected, pause=pause: (
                    [event.data["pause"] for event in rank.events(kind)][-1:] == [pause]
                ),
                f"{expected.value} in pause {pause}",
            )
            process.say("")
        process.expect("done")
    refused = [event.data["reason"] for event in rank.events(EventKind.NOT_VACATED)]
    assert refused[0] == "2 collectives are in flight"
    assert "whether collectives are in flight is not known" in refused[1]

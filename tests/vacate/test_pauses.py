"""A real training process is asked to vacate, with a model in the place of CUDA's API: what it
answers, what its status shows, and that nothing opens the gate before its memory is back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import Child, wait_until
from zygote import forked

from hydroslurm.core.ack import Answer
from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import RankStatus, read_status
from hydroslurm.runtime import client

HERE = Path(__file__).parent

INSTALLED = """
    import ctypes, sys, threading, time, torch, hydroslurm
    from dataclasses import replace
    from hydroslurm.core.events import EventKind
    from hydroslurm.gate.protocol import GateState
    from hydroslurm.runtime import device as devices
    from hydroslurm.vacate.communicators import Communicators
    from hydroslurm.vacate.cuda_checkpoint import CONTEXT_BYTES, CudaCheckpoint

    run_dir, model_py, folder, *rest = sys.argv[1:]
    controller = hydroslurm.install(run_dir=run_dir)
    controller.vacating.open_device = lambda: CudaCheckpoint(
        used_bytes=lambda: 10**9 - CONTEXT_BYTES, devices=1, communicators=Communicators(),
        command=[sys.executable, model_py, folder],
    )
    controller.vacating._limits = replace(controller.vacating._limits, retry_s=0.05)
    model = torch.nn.Linear(32, 32)
"""

TRAIN = """
    if rest:
        controller.claim_stops()
    print("ready", flush=True)
    step = 0
    while controller.stop_request is None:
        model.zero_grad()
        model(torch.ones(8, 32)).sum().backward()
        step += 1
        controller.step = step
    print("stopped", open(folder + "/calls").read().split()[-2], flush=True)
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

    def told(self, kind: EventKind) -> Event:
        """The last event of the kind, which there will be."""
        wait_until(lambda: bool(self.events(kind)), kind.value)
        return self.events(kind)[-1]

    def is_at(self, state: str) -> bool:
        """Where the model has the process's memory."""
        file = self.model / str(self.pid)
        return (file.read_text() if file.exists() else "running") == state

    def faults(self, *faults: tuple[str, int, str]) -> None:
        (self.model / "calls").unlink(missing_ok=True)
        (self.model / "faults.json").write_text(json.dumps(faults))

    def vacate(self) -> Answer:
        return client.pause(self.pid, vacate=True, timeout_s=60)

    def resume(self) -> None:
        answer = client.resume(self.pid, timeout_s=60)
        assert answer.done, answer.message

    def ends_in_order(self, *kinds: EventKind) -> None:
        """The last events of these kinds are in this order."""
        order = [event.kind for event in reversed(self.events())]
        places = [order.index(kind) for kind in kinds]
        assert places == sorted(places, reverse=True)


Start = Callable[..., Rank]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the process, with an environment of its own."""
    (tmp_path / "faults.json").write_text("[]")
    made = []

    def begin(code: str = TRAIN, *arguments: str, **environ: str) -> Rank:
        all_of_them = (str(tmp_path / "run"), str(HERE / "model.py"), str(tmp_path), *arguments)
        context = forked(INSTALLED + code, tmp_path, *all_of_them, environ=environ)
        made.append(context)
        process = context.__enter__()
        process.expect("ready")
        return Rank(process, tmp_path)

    yield begin
    for context in made:
        context.__exit__(*sys.exc_info())


def test_a_pause_that_asks_for_it_vacates(start: Start) -> None:
    """`pause --vacate` answers with the bytes and the seconds; the status shows them while it is
    so; a resume is answered once all is back. The next pause, which does not ask, moves nothing.
    SIGTERM to a vacated rank: the memory comes back first, and only then the training thread goes
    on to its safe point."""
    rank = start(TRAIN, "claims")
    answer = rank.vacate()
    assert answer.done, answer.message
    assert answer.vacated_bytes == 10**9
    assert "1.00 GB vacated" in answer.message
    assert rank.is_at("checkpointed")
    wait_until(lambda: rank.status.vacated_bytes == 10**9, "the status")
    assert "on the host" in rank.status.vacated_message
    rank.resume()
    assert rank.is_at("running")
    rank.ends_in_order(EventKind.VACATED, EventKind.RESTORED, EventKind.RESUMED)
    assert client.pause(rank.pid).vacated_bytes is None
    rank.resume()
    assert len(rank.events(EventKind.VACATED)) == 1
    assert rank.status.vacated_bytes == 0
    assert rank.vacate().done
    rank.process.signal(signal.SIGTERM)
    assert rank.process.expect("stopped") == "unlock"
    wait_until(lambda: len(rank.events(EventKind.RESUMED)) == 3, "the controller's last lines")
    rank.ends_in_order(EventKind.RESTORED, EventKind.RESUMED)


def test_what_goes_wrong(start: Start) -> None:
    """A plain pause in force is made a vacated one by asking, and asking again after a failure
    tries again. Somebody else has the memory at the resume: the rank says so, stays parked, and
    goes on once it is free. An error without harm is a plain pause that trains on; a device that is
    lost is told in the answer, the status and the events."""
    rank = start()
    rank.faults(("lock", 1, "refuse"), ("restore", 1, "refuse"))
    assert client.pause(rank.pid).done
    failed = rank.vacate()
    assert not failed.done
    assert "not vacated" in failed.message
    wait_until(lambda: "CUDA_ERROR_UNKNOWN" in (rank.status.not_vacated or ""), "the status")
    assert rank.vacate().done
    rank.resume()
    (waited,) = rank.events(EventKind.RESTORE_WAITS)
    assert "CUDA_ERROR_UNKNOWN" in waited.data["reason"]
    assert rank.is_at("running")
    for how in ("refuse", "fail"):
        rank.faults(("checkpoint", 1, how))
        answer = rank.vacate()
        assert not answer.done
        assert "CUDA_ERROR_UNKNOWN" in answer.message
        wait_until(lambda: rank.status.not_vacated is not None, "the status")
        wait_until(lambda how=how: rank.status.is_lost == (how == "fail"), "what is lost")
        assert rank.told(EventKind.NOT_VACATED).data.get("lost", False) == (how == "fail")
        if how == "refuse":
            rank.resume()
            before = rank.status.step or 0
            client.pause(rank.pid)
            rank.resume()
            wait_until(lambda before=before: (rank.status.step or 0) > before, "a step")


def test_never_is_never(start: Start) -> None:
    """A job that forbids it is paused, and says nothing of its memory before the time is over."""
    rank = start(HYDROSLURM_VACATE="never")
    assert not client.pause(rank.pid, vacate=True, timeout_s=0.5).done
    assert rank.is_at("running")


def test_too_little_of_the_grace(start: Start) -> None:
    """A suspend of Slurm's that leaves too little time parks, and says how much it would take; a
    person's pause has no such limit."""
    rank = start(HYDROSLURM_VACATE="always", HYDROSLURM_SUSPEND_GRACE_S="0.3")
    rank.process.signal(signal.SIGTSTP)
    reason = rank.told(EventKind.NOT_VACATED).data["reason"]
    assert "suspend_grace_time" in reason
    assert "1.0 GB" in reason
    rank.process.signal(signal.SIGCONT)
    wait_until(lambda: rank.status.state == "running", "running")
    rank.process.signal(signal.SIGUSR1)
    rank.told(EventKind.VACATED)


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
    class Ranks:  # of which this is the only one to be asked
        rank, world_size, have_joined, lost = 0, 1, True, None
        def agree(self, topic, value, **limits): return {0: value}
        def on_gate_event(self, seen): pass
        def leave(self): pass

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
    print("ready", flush=True)
    thread.start()
    while thread.is_alive():
        model(torch.ones(8, 32))
"""


def test_an_announcement_that_is_quicker_than_the_ranks_own_thread(start: Start) -> None:
    """The others may say that all are parked before this rank has written down that its gate has
    closed: it vacates all the same, in the pause of that number. With collectives in flight, or
    where nobody knows, it does not, and says why."""
    rank = start(ANNOUNCED, HYDROSLURM_VACATE="always")
    vacated, refused = EventKind.VACATED, EventKind.NOT_VACATED
    for pause, kind in enumerate((vacated, refused, refused, vacated), start=1):
        rank.process.expect("announced")
        wait_until(
            lambda kind=kind, pause=pause: (
                [event.data["pause"] for event in rank.events(kind)][-1:] == [pause]
            ),
            f"{kind.value} in pause {pause}",
        )
        rank.process.say("")
    rank.process.expect("done")
    reasons = [event.data["reason"] for event in rank.events(refused)]
    assert reasons[0] == "2 collectives are in flight"
    assert "whether collectives are in flight is not known" in reasons[1]


# --- a device that is asynchronous: a queue that a thread works off behind the training's back.
# torch's four calls that ask for CUDA ask this one instead

QUEUE = """
    device = ctypes.CDLL(rest[0])
    device.device_launch.argtypes = [ctypes.c_int64]
    device.device_queued.restype = device.device_finished_ns.restype = ctypes.c_int64
    weights = torch.ones(1 << 20)
    torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
    torch.cuda.device_count, torch.cuda.current_device = (lambda: 1), (lambda: 0)
    torch.cuda.synchronize = lambda index: device.device_synchronize()

    def hears():  # issues no operator: nobody holds it
        for line in sys.stdin:
            verb, _, value = line.strip().partition(" ")
            if verb == "stick":
                device.device_stick(int(value))
            elif verb == "limit":
                devices.DRAIN_LIMIT_S = float(value)
            told = device.device_queued(), device.device_finished_ns(), device.device_waiting()
            print("told", *told, flush=True)

    threading.Thread(target=hears, daemon=True).start()
    print("ready", flush=True)
    while True:
        weights[:8].add_(1)
        if device.device_queued() < 50:
            device.device_launch(200_000)
"""


def test_drained_is_when_the_device_is(
    start: Start, tmp_path: Path, native_compiler: list[str]
) -> None:
    """`parked` does not wait for the queue; `drained` and `vacated` do: each is later than the last
    kernel's end. A queue that does not end is given up after the limit, and the vacate is refused
    with that as its reason; the rank can be resumed, and the next vacate works."""
    library = tmp_path / "device.so"
    sources = HERE / "native" / "queue_device.cpp"
    command = [*native_compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-Wall"]
    command += ["-Wextra", "-Werror", f"-I{HERE.parent / 'native'}", str(sources)]
    subprocess.run([*command, "-o", str(library)], check=True, timeout=120)
    rank = start(QUEUE, str(library))

    def tell(line: str = "ask") -> list[int]:
        """What is queued, when the last kernel finished, how many threads wait for the queue."""
        rank.process.say(line)
        return [int(one) for one in rank.process.expect("told").split()]

    def stick() -> None:
        tell("stick 1")
        wait_until(lambda: tell()[0] > 2, "kernels in the queue")

    stick()
    assert client.pause(rank.pid, timeout_s=60).done
    wait_until(lambda: rank.status.state == "parked", "the status")
    wait_until(lambda: tell()[2] == 1, "a thread that waits for the device")
    assert not rank.events(EventKind.DRAINED)
    tell("stick 0")
    drained = rank.told(EventKind.DRAINED)
    queued, finished_ns, _ = tell()
    assert queued == 0
    assert drained.mono_ns >= finished_ns
    rank.resume()

    stick()
    answers: list[Answer] = []
    asks = threading.Thread(target=lambda: answers.append(rank.vacate()))
    asks.start()
    wait_until(lambda: tell()[2] == 2, "both that wait: the pause and its vacate")
    assert len(rank.events(EventKind.PARKED)) == 2
    assert not rank.events(EventKind.VACATED)
    tell("stick 0")
    asks.join()
    assert answers[0].done, answers[0].message
    assert rank.told(EventKind.VACATED).mono_ns >= tell()[1]
    rank.resume()

    tell("limit 0.5")
    stick()
    refused = rank.vacate()
    assert not refused.done
    assert "not vacated: the device is not idle: still busy after 0.5 s" in refused.message
    wait_until(lambda: rank.status.state == "parked", "the status")
    assert rank.told(EventKind.NOT_VACATED).data["vacate_s"] >= 0.5
    assert rank.told(EventKind.NOT_DRAINED).data["waited_s"] >= 0.5
    rank.resume()
    tell("stick 0")
    assert rank.vacate().done
    rank.resume()

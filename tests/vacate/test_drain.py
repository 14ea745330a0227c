"""A pause and a vacate on a device that is asynchronous: a queue that a thread works off behind the
training's back. torch's four calls that ask for CUDA ask this one instead."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Child, wait_until
from zygote import forked

from hydroslurm.core.ack import Answer
from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import read_status
from hydroslurm.runtime import client

HERE = Path(__file__).parent

TRAIN = """
    import ctypes, sys, threading, torch, hydroslurm
    from hydroslurm.runtime import controller as controllers
    from hydroslurm.vacate.communicators import Communicators
    from hydroslurm.vacate.cuda_checkpoint import CudaCheckpoint
    device = ctypes.CDLL(sys.argv[2])
    device.device_launch.argtypes = [ctypes.c_int64]
    device.device_queued.restype = device.device_finished_ns.restype = ctypes.c_int64
    controller = hydroslurm.install(run_dir=sys.argv[1])
    controller.vacating.open_device = lambda: CudaCheckpoint(
        used_bytes=lambda: 10**6, devices=1, communicators=Communicators(),
        command=[sys.executable, *sys.argv[3:]],
    )
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
                controllers.DRAIN_LIMIT_S = controller.vacating._drain_s = float(value)
            told = device.device_queued(), device.device_finished_ns(), device.device_waiting()
            print("told", *told, flush=True)

    threading.Thread(target=hears, daemon=True).start()
    print("ready", flush=True)
    while True:
        weights[:8].add_(1)
        if device.device_queued() < 50:
            device.device_launch(200_000)
"""


class Rank:
    """The training, and what its device says of itself."""

    def __init__(self, process: Child, run: RunDir) -> None:
        self._process, self._run, self.pid = process, run, process.pid

    def tell(self, line: str = "ask") -> tuple[int, int, int]:
        """What is queued, when the last kernel finished, how many threads wait for the queue."""
        self._process.say(line)
        queued, finished_ns, waiting = map(int, self._process.expect("told").split())
        return queued, finished_ns, waiting

    def stick(self) -> None:
        self.tell("stick 1")
        wait_until(lambda: self.tell()[0] > 2, "kernels in the queue")

    def of(self, kind: EventKind) -> list[Event]:
        return [one for one in read_events(self._run.rank_events(0)) if one.kind is kind]

    @property
    def state(self) -> str:
        status = read_status(self._run.rank_status(0))
        assert status is not None
        return status.state


@pytest.fixture
def rank(tmp_path: Path, native_compiler: list[str]) -> Iterator[Rank]:
    library = tmp_path / "device.so"
    sources = HERE / "native" / "queue_device.cpp"
    command = [*native_compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-Wall"]
    command += ["-Wextra", "-Werror", f"-I{HERE.parent / 'native'}", str(sources)]
    done = subprocess.run(
        [*command, "-o", str(library)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (tmp_path / "faults.json").write_text("[]")
    arguments = (str(tmp_path / "run"), str(library), str(HERE / "model.py"), str(tmp_path))
    with forked(TRAIN, tmp_path, *arguments) as process:
        process.expect("ready")
        yield Rank(process, RunDir(tmp_path / "run"))


def test_drained_is_when_the_device_is(rank: Rank) -> None:
    """`parked` does not wait for the queue; `drained` and `vacated` do: each is later than the last
    kernel's end. A queue that does not end is given up after the limit, and the vacate is refused
    with that as its reason; the rank can be resumed, and the next vacate works."""
    rank.stick()
    assert client.pause(rank.pid, timeout_s=60).done
    wait_until(lambda: rank.state == "parked", "the status")
    wait_until(lambda: rank.tell()[2] == 1, "a thread that waits for the device")
    assert not rank.of(EventKind.DRAINED)
    rank.tell("stick 0")
    wait_until(lambda: bool(rank.of(EventKind.DRAINED)), "drained")
    queued, finished_ns, _ = rank.tell()
    (drained,) = rank.of(EventKind.DRAINED)
    assert queued == 0
    assert drained.mono_ns >= finished_ns
    assert client.resume(rank.pid, timeout_s=60).done

    rank.stick()
    answers: list[Answer] = []
    asks = threading.Thread(
        target=lambda: answers.append(client.pause(rank.pid, vacate=True, timeout_s=60))
    )
    asks.start()
    wait_until(lambda: rank.tell()[2] == 2, "both that wait: the pause and its vacate")
    assert len(rank.of(EventKind.PARKED)) == 2
    assert not rank.of(EventKind.VACATED)
    rank.tell("stick 0")
    asks.join()
    assert answers[0].done, answers[0].message
    (vacated,) = rank.of(EventKind.VACATED)
    assert vacated.mono_ns >= rank.tell()[1]
    assert client.resume(rank.pid, timeout_s=60).done

    rank.tell("limit 0.5")
    rank.stick()
    refused = client.pause(rank.pid, vacate=True, timeout_s=60)
    assert not refused.done
    assert "not vacated: the device is not idle: still busy after 0.5 s" in refused.message
    wait_until(lambda: rank.state == "parked", "the status")
    (told,) = rank.of(EventKind.NOT_VACATED)
    assert told.data["vacate_s"] >= 0.5
    wait_until(lambda: bool(rank.of(EventKind.NOT_DRAINED)), "not drained")
    (given_up,) = rank.of(EventKind.NOT_DRAINED)
    assert given_up.data["waited_s"] >= 0.5
    assert client.resume(rank.pid, timeout_s=60).done
    rank.tell("stick 0")
    assert client.pause(rank.pid, vacate=True, timeout_s=60).done
    assert client.resume(rank.pid, timeout_s=60).done

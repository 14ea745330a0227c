"""A file system that is really full: a small tmpfs, mounted and filled by the test."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until
from zygote import forked

from hydroslurm.core.events import Event, EventKind
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import read_status
from hydroslurm.runtime import client

TRAIN = """
    import sys, torch, hydroslurm
    controller = hydroslurm.install(run_dir=sys.argv[1])
    torch.set_num_threads(1)
    weight = torch.ones(8, 8)
    print("ready", flush=True)
    step = 0
    while True:
        weight = (weight @ weight).clamp(-1, 1)
        step += 1
        controller.step = step
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a megabyte."""
    if os.getuid() != 0:
        pytest.skip("only root can mount a file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def _full(folder: Path) -> Iterator[None]:
    """Not a byte is left while this lasts, also none in the last page of a file."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    yield
    ballast.unlink()


def test_a_pause_is_answered_on_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    """As often as one asks, each with the latency of its own; once there is room events are written
    again, none glued to the one that was torn, and the lost ones are counted."""
    run = RunDir(small_disk / "run")

    def status() -> Any:
        return read_status(run.rank_status(0))

    with forked(
        TRAIN, tmp_path, str(run.root), environ={"HYDROSLURM_HEARTBEAT_S": "0.1"}
    ) as trainer:
        trainer.expect("ready")
        wait_until(lambda: status() and status().step, "a heartbeat")
        with _full(small_disk):
            for number in range(1, 16):
                parked = client.pause(trainer.pid)
                assert parked.done
                assert "parked after" in parked.message
                told = ("parked", number)
                wait_until(lambda: (status().state, status().pauses) == told, "its status")  # noqa: B023
                assert client.resume(trainer.pid).done
        assert client.pause(trainer.pid).done
        assert client.resume(trainer.pid).done
        found, torn = [], []
        for line in run.rank_events(0).read_bytes().splitlines():
            try:
                found.append(Event.from_json(line))
            except ValueError:
                torn.append(line)
        assert len(torn) <= 2, torn
        assert any(event.kind is EventKind.EVENTS_DROPPED for event in found)
        assert [e.data["pause"] for e in found if e.kind is EventKind.PARKED][-1] == 16
        assert [event.kind for event in found][-3:] == [
            EventKind.SIGNAL_RECEIVED,
            EventKind.RESUMED,
            EventKind.FIRST_OPERATOR_RELEASED,
        ]
        stamps = [event.mono_ns for event in found if event.kind is EventKind.PARKED]
        assert stamps == sorted(stamps)
        assert sum("events cannot be written" in line for line in trainer.lines) == 1
        wait_until(lambda: any("again" in line for line in trainer.lines), "one line that it works")

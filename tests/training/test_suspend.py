"""HFAI's protocol, and a Run in processes of their own: real signals, real exits."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from processes import wait_until
from zygote import forked

OWN_LOOP = """
    import os, sys, time
    import hydroslurm
    from torch.utils.data import DataLoader, Dataset

    class Endless(Dataset):
        def __len__(self):
            return 10**9

        def __getitem__(self, index):
            time.sleep(0.01)
            return index

    os.setpgid(0, 0)
    batches = iter(DataLoader(Endless(), 2, num_workers=1)) if "late" in sys.argv else None
    hydroslurm.receive_suspend_command()
    batches = batches or iter(DataLoader(Endless(), 2, num_workers=2))
    next(batches)
    print("ready", *(worker.pid for worker in batches._workers), flush=True)
    while not hydroslurm.receive_suspend_command():
        next(batches)
    for _ in range(20):  # none of what the workers had fetched ahead
        next(batches)
    print("saved", flush=True)
    hydroslurm.go_suspend()
"""


def test_a_loop_of_ones_own_hears_saves_and_leaves(tmp_path: Path) -> None:
    """SIGTERM is received, by its DataLoader workers too, as Slurm does it; they go on, the loop
    saves, and the process leaves with "run me again", its workers with it."""
    with forked(OWN_LOOP, tmp_path) as program:
        workers = program.expect("ready").split()
        assert len(workers) == 2
        os.killpg(program.pid, signal.SIGTERM)
        program.expect("saved")
        assert program.wait() == 75
        assert "started before" not in str(program)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "end of workers")


def test_going_without_a_request_is_refused(tmp_path: Path) -> None:
    """go_suspend() out of the blue is a mistake of the loop's, and says so; so are workers that
    began before the first call, and would die of a stop."""
    code = OWN_LOOP.replace("while not", "while False and not")
    with forked(code, tmp_path, "late") as program:
        assert program.wait() == 1
        assert "go_suspend() was called without a stop request" in str(program)
        assert "1 process of multiprocessing (DataLoader workers?) started before" in str(program)

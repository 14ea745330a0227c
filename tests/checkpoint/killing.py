"""A program that has saves killed at every I/O call, and looks at what is left after each kill.

    killing.py FOLDER calls save|save_and_prune|link   a line "killed N" per kill
    killing.py FOLDER moments COUNT SEED                             real kills at any moment

It loads torch once and forks: the child saves and dies, the parent looks. Ends with "done N", or
with an assertion that says what was found.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from checkpoint.faulty import CountingStorage, killing
from checkpoint.states import holds, newest_in, state_of, write

from hydroslurm.checkpoint import checksummed_file
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.store import CheckpointStore, Retention

CHUNK_BYTES = 2048

Save = Callable[[Path, Storage, int], None]


def save(folder: Path, storage: Storage, step: int) -> None:
    checksummed_file.CHUNK_BYTES = CHUNK_BYTES
    store = CheckpointStore(folder, storage=storage)
    write(store, state_of(step), step=step, kind="periodic")


def save_and_prune(folder: Path, storage: Storage, step: int) -> None:
    store = CheckpointStore(folder, storage=storage)
    write(store, state_of(step), step=step, kind="periodic")
    store.prune(Retention(keep=1, keep_stop=0))


def link(folder: Path, storage: Storage, step: int) -> None:
    """Save with a base model that the checkpoint before has."""
    checksummed_file.CHUNK_BYTES = CHUNK_BYTES
    store = CheckpointStore(folder, storage=storage)
    *_, one, two = (None, *CheckpointStore(folder).committed())
    for before in filter(None, (one, two)):
        store.frozen.note(before)
    written = write(store, state_of(step, base=True), step=step, kind="periodic")
    names = [name for name in written.manifest.files if name.startswith("frozen-")]
    assert len(names) == 2
    if one is not None and one.step and written.path != two.path:  # the first one has none
        assert all((one.path / name).samefile(written.path / name) for name in names)
    store.prune(Retention(keep=2, keep_stop=0))


def at_every_call(folder: Path, doing: Save) -> int:
    """Kill the n-th save at its n-th call, until one gets through alive."""
    write(CheckpointStore(folder), state_of(0), step=0, kind="periodic")
    old, kill = 0, 0
    while True:
        kill += 1
        new = old + 1
        status = _forked(lambda new=new, kill=kill: doing(folder, killing(kill), new))
        old = look(folder, old=old, new=new)
        if status == 0:
            assert old == new, f"the save of step {new} came back, and is not there"
            return kill - 1
        assert status == signal.SIGKILL, f"the child ended with {status}"
        print(f"killed {kill}", flush=True)
        # the run goes on: the step is saved again, leftovers or not; the next look loads it
        doing(folder, CountingStorage(), new)
        old = new
        if kill % 25 == 0:
            CheckpointStore(folder).prune(Retention(keep=2))


def at_any_moment(folder: Path, *, count: int, seed: int) -> int:
    """Kill a process that saves without pause, ``count`` times."""
    chance = random.Random(seed)
    write(CheckpointStore(folder), state_of(0), step=0, kind="periodic")
    old = 0
    for _ in range(count):
        child = os.fork()
        if child == 0:
            step = old
            while True:
                step += 1
                save_and_prune(folder, CountingStorage(), step)
        time.sleep(chance.uniform(0.0, 0.08))  # the moment is what is varied here
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = newest_in(CheckpointStore(folder))
        assert found is not None
        assert found.step >= old, f"step {old} was committed, {found.step} is the newest"
        assert holds(CheckpointStore(folder), found, found.step)
        old = found.step
    CheckpointStore(folder).prune(Retention(keep=2))
    left = sorted(path.name for path in folder.iterdir())
    assert len(left) == 2, f"killed saves left {left}"
    return count


def look(folder: Path, *, old: int, new: int) -> int:
    """The step of the newest good checkpoint, which is the old or the new state, bit for bit."""
    store = CheckpointStore(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if (folder / f"step-{new:09d}").exists() else "error")
        found = newest_in(store)
    assert found is not None
    assert found.step in (old, new), f"{found.step} instead of {old} or {new}"
    assert holds(store, found, found.step), f"step {found.step} came back changed"
    return found.step


def _forked(work: Callable[[], None]) -> int:
    """Run in a child; 0, or the number of the signal that it died of."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)


if __name__ == "__main__":
    warnings.simplefilter("error")
    where = Path(sys.argv[1])
    if sys.argv[2] == "calls":
        ways = {way.__name__: way for way in (save, save_and_prune, link)}
        print("done", at_every_call(where, ways[sys.argv[3]]))
    else:
        print("done", at_any_moment(where, count=int(sys.argv[3]), seed=int(sys.argv[4])))

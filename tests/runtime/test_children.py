"""Processes below a rank survive its pause signals, and those of multiprocessing stop with it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Child, child, descendants, stat_of, wait_until

from hydroslurm.core.events import EventKind, read_events
from hydroslurm.runtime import client

SPAWNER = """
    import multiprocessing, os, signal, time
    from hydroslurm.runtime.children import spawns_shielded

    def work(pipe):
        pipe.send(pipe.recv() + 1)

    if __name__ == "__main__":
        with spawns_shielded({signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP}):
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            child = context.Process(target=work, args=(theirs,))
            child.start()
        for _ in range(20):  # from its very first moment on, while it is still importing
            os.kill(child.pid, signal.SIGUSR1)
            os.kill(child.pid, signal.SIGUSR2)
            time.sleep(0.001)
        ours.send(41)
        print("answer", ours.recv())
        child.join()
        print("exit", child.exitcode)
        print("parent blocks", sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
"""


def test_spawned_child_survives_pause_signals(tmp_path: Path) -> None:
    """A child that is signalled from its first moment works on and exits 0, and the parent's mask
    is as before."""
    with child(SPAWNER, tmp_path) as spawner:
        assert spawner.expect("answer") == "42"
        assert spawner.expect("exit") == "0"
        assert spawner.expect("parent blocks") == "[]"


FAMILY = """
    import itertools, json, multiprocessing, os, signal, subprocess, sys, threading
    import torch
    from torch.utils.data import DataLoader

    METHODS = ("fork", "spawn", "forkserver")

    def produce(queue, name, below, method):
        if below:
            context = multiprocessing.get_context(method)
            context.Process(target=produce, args=(queue, name + "'s own", False, method)).start()
        for number in itertools.count():  # nearly always inside a write, with the queue's lock
            queue.put((name, number, bytes(100_000)))

    def be_a_rank(pipe):
        import hydroslurm
        hydroslurm.install(alone=True)
        pipe.send("up")
        pipe.recv()

    def square(n):
        return n * n

    def read(queue):
        due = {}
        while True:
            name, number, _ = queue.get()
            assert number == due.get(name, 0), (name, number, due)
            due[name] = number + 1
            if len(due) == 2 * len(METHODS):
                all_produce.set()

    BUSY = "import signal; signal.signal(signal.SIGUSR2, lambda *_: print('heard', flush=True))"
    BUSY += "; print('up', flush=True)\\nwhile True: pass"

    if __name__ == "__main__":
        import hydroslurm

        controller = hydroslurm.install(run_dir=sys.argv[1])
        all_produce = threading.Event()
        pool = multiprocessing.get_context("fork").Pool(1)
        queue = multiprocessing.get_context("spawn").Queue(2)
        stopped = [pool._pool[0].pid]
        for method in METHODS:
            process = multiprocessing.get_context(method).Process(
                target=produce, args=(queue, method, True, method))
            process.start()
            stopped.append(process.pid)
        threading.Thread(target=read, args=(queue,), daemon=True).start()
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        rank = multiprocessing.get_context("spawn").Process(target=be_a_rank, args=(theirs,))
        rank.start()
        ours.recv()
        batches = iter(DataLoader(range(100), num_workers=1))
        busy = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
        busy.stdout.readline()
        all_produce.wait()
        runs_on = [rank.pid, batches._workers[0].pid, busy.pid]
        print("pids", json.dumps([stopped, runs_on]))
        while line := sys.stdin.readline().strip():
            if line == "heard":
                print("user's own", busy.stdout.readline().strip())
            elif line == "work":
                all_produce.clear()
                squares = pool.map_async(square, range(4)).get(60)
                print("work", squares, all_produce.wait(60))
            elif line == "claim":
                controller.claim_stops()
                print("claimed")
            elif line == "pool":
                worker = pool._pool[0]
                pool.terminate()
                pool.join()
                print("pool", worker.exitcode)
"""


class Family:
    """A rank with children of every kind, in a process group of its own."""

    def __init__(self, rank: Child, run: Path) -> None:
        self.rank = rank
        self.events = run / "events" / "rank-00000.jsonl"
        self.stopped, self.runs_on = json.loads(rank.expect("pids"))
        for pid in tuple(self.stopped):
            self.stopped += descendants(pid)
        assert len(self.stopped) >= 7, "a pool, and three with a child each"

    def signal(self, signo: int) -> None:
        os.killpg(self.rank.pid, signo)

    def stands_still(self) -> bool:
        assert not any(stat_of(pid)[0] == "T" for pid in self.runs_on)
        return all(stat_of(pid)[0] == "T" for pid in self.stopped)

    def goes_on(self) -> bool:
        return not any(stat_of(pid)[0] == "T" for pid in self.stopped)

    def works(self) -> None:
        """Nothing was lost or torn in the queue, and a pool answers."""
        self.rank.say("work")
        assert self.rank.expect("work") == "[0, 1, 4, 9] True", str(self.rank)


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    with child(FAMILY, tmp_path, str(tmp_path / "run"), prefix=("setsid",)) as rank:
        try:
            yield Family(rank, tmp_path / "run")
        finally:
            os.killpg(rank.pid, signal.SIGKILL)


def test_children_stand_still_with_their_rank(family: Family) -> None:
    """Signals to all processes of a rank: what multiprocessing made stops and goes on with it, in
    the middle of a write to a queue too, and through somebody else's SIGCONT. A stop wins. What
    must run on does, and a program with a handler of its own hears its signal."""
    family.signal(signal.SIGUSR1)
    wait_until(family.stands_still, "all stop")
    kinds = (EventKind.PARKED,)
    wait_until(lambda: list(read_events(family.events, kinds=kinds)), "the event")
    (parked,) = read_events(family.events, kinds=kinds)
    assert parked.data["children"] == len(family.stopped)
    os.kill(family.stopped[1], signal.SIGCONT)
    wait_until(family.stands_still, "one that was continued stops again")
    family.signal(signal.SIGUSR2)
    wait_until(family.goes_on, "all go on")
    family.works()
    family.rank.say("heard")
    assert family.rank.expect("user's own") == "heard"

    family.signal(signal.SIGTSTP)
    wait_until(family.stands_still, "Slurm's pause")
    family.signal(signal.SIGCONT)
    family.works()

    family.rank.say("claim")
    family.rank.expect("claimed")
    assert client.pause(family.rank.pid).done
    wait_until(family.stands_still, "all stop")
    family.rank.signal(signal.SIGTERM)
    wait_until(family.goes_on, "a stop lets them go")
    family.works()
    family.rank.say("pool")
    assert family.rank.expect("pool") in ("0", str(-signal.SIGTERM))


def test_a_rank_that_is_killed_while_parked(family: Family) -> None:
    """None of them stays stopped."""
    assert client.pause(family.rank.pid).done
    wait_until(family.stands_still, "all stop")
    family.rank.signal(signal.SIGKILL)
    wait_until(family.goes_on, "all go on")

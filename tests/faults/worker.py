"""The crew of a fault round: forks ranks as ``together.crew`` does, which do to themselves what the
plan says, at the very moment that it says.

More options: ``keep``, of the Run; ``workers``, of the loader; ``checks``, so many collectives
behind each step, as in an evaluation, with a check for a stop after each; ``think_s``, how long a
step takes at least; and ``faults``, those of this attempt. A rank that comes to one prints ``fault
N PID``, N from 0, and the coordinator where that is concerned; what is to follow later (SIGCONT
after a freeze) is up to whoever reads that.
"""

from __future__ import annotations

import collections
import faulthandler
import io
import json
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from coordination import crew
from faults.plans import Fault
from forkedranks import serve
from kit.team import coordinator_of
from torch.utils.data import DataLoader

import hydroslurm
from hydroslurm.checkpoint import folders, save
from hydroslurm.coordination.agreements import PendingAgreements
from hydroslurm.core.events import EventLog
from hydroslurm.data import SeededDataset
from hydroslurm.errors import AgreementFailed, CoordinatorLost
from hydroslurm.runtime.controller import Controller
from hydroslurm.training import session

SELF_SIGNALS = {
    "term": (signal.SIGTERM,),
    "urg": (signal.SIGURG,),
    "term_twice": (signal.SIGTERM, signal.SIGTERM),
    "pause": (signal.SIGUSR1,),
    "resume": (signal.SIGUSR2,),
    "kill": (signal.SIGKILL,),
    "freeze": (signal.SIGSTOP,),
}
LATE = (signal.SIGTERM, signal.SIGURG, signal.SIGUSR1, signal.SIGUSR2)
COORDINATOR_SIGNALS = {"kill_coordinator": signal.SIGKILL, "freeze_coordinator": signal.SIGSTOP}


class Moments:
    """Counts the moments of this rank, and acts at those that the plan names. From any thread."""

    def __init__(
        self, faults: list[tuple[int, Fault]], *, rank: int, directory: Path, attempt: str
    ) -> None:
        self._faults = faults
        self._directory = directory
        self._told = directory / f"told-{rank}"
        self._attempt = attempt
        self._counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def reach(self, moment: str) -> None:
        with self._lock:
            self._counts[moment] += 1
            nth = self._counts[moment]
        for index, fault in self._faults:
            if (fault.moment, fault.nth) == (moment, nth):
                act(index, fault, checkpoints=self._directory / "checkpoints")

    def note(self, topic: str, outcome: Any) -> None:
        """Keep what this rank was told, to be compared with what the others were."""
        line = json.dumps([self._attempt, topic, outcome]) + "\n"
        fd = os.open(self._told, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, line.encode())
        os.close(fd)


def act(index: int, fault: Fault, *, checkpoints: Path) -> None:
    """Say so, and do what this process can do to itself."""
    coordinator = coordinator_of(os.getpid()) if fault.what in COORDINATOR_SIGNALS else None
    os.write(1, f"\nfault {index} {coordinator or 0}\n".encode())
    if fault.what == "error":
        raise RuntimeError("a fault of the training")
    if fault.what == "delay":
        time.sleep(fault.seconds)
    if fault.what == "await_commit":
        while not any(checkpoints.glob("step-*")):
            time.sleep(0.01)
    if coordinator is not None:
        os.kill(coordinator, COORDINATOR_SIGNALS[fault.what])
    for signo in SELF_SIGNALS.get(fault.what, ()):
        os.kill(os.getpid(), signo)


def watch(moments: Moments) -> None:
    """Put the moments into this process's hydroslurm and torch."""
    append, agree = EventLog.append, PendingAgreements.agree

    def append_and_tell(self: EventLog, event: Any) -> None:
        append(self, event)
        moments.reach(f"event {event.kind.value}")

    def agree_and_tell(self: PendingAgreements, topic: str, value: Any, **more: Any) -> Any:
        short = "/".join(part for part in topic.split("/") if not part.isdecimal())
        moments.reach(f"agree {short}")
        try:
            values = agree(self, topic, value, **more)
        except AgreementFailed as error:
            moments.note(topic, ["failed", *error.missing, "withdrawn", *error.withdrawn])
            moments.reach(f"agreed {short}")
            raise
        except CoordinatorLost:
            raise  # nobody was told anything
        if more.get("collect_at") is None:  # else what a rank is told depends on the rank
            moments.note(topic, zlib.crc32(json.dumps(sorted(values.items())).encode()))
        moments.reach(f"agreed {short}")
        return values

    EventLog.append = append_and_tell  # type: ignore[method-assign]
    PendingAgreements.agree = agree_and_tell  # type: ignore[method-assign]
    around(session.Session, "safe_point", before=lambda: moments.reach("step"))
    around(session.Session, "check_stop", before=lambda: moments.reach("check"))
    around(Controller, "claim_stops", after=lambda: moments.reach("claimed"))
    around(dist, "init_process_group", after=lambda: moments.reach("group"))
    around(folders, "put", after=lambda: moments.reach("rename"))
    around(save.Save, "_finish", after=lambda: moments.reach("renamed"))


def around(
    owner: Any,
    name: str,
    *,
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Have something called around a function."""
    function = getattr(owner, name)

    def called(*arguments: Any, **named: Any) -> Any:
        before()
        result = function(*arguments, **named)
        after()
        return result

    setattr(owner, name, called)


def train(parts: crew.Parts) -> None:
    """The loop that is disturbed."""
    options = parts.options
    run = hydroslurm.Run(
        model=parts.model,
        optimizer=parts.optimizer,
        loader=loader_of(parts),
        directory=options["directory"],
        every_steps=options.get("every_steps", 0),
        every_s=options.get("every_s", 0),
        keep=options.get("keep", 2),
    )
    with run:
        run.resume()
        for inputs, samples in run.batches(epochs=options["epochs"]):
            time.sleep(options.get("think_s", 0))
            parts.step(run.step, inputs, samples)
            for _ in range(options.get("checks", 0)):
                dist.all_reduce(torch.ones(1))
                run.check_stop()
        parts.tell(run.step)


def loader_of(parts: crew.Parts) -> DataLoader[Any]:
    """The loader of all crews, with workers where these are wanted."""
    workers = parts.options.get("workers", 0)
    if not workers:
        return parts.loader
    return DataLoader(
        SeededDataset(parts.loader.dataset),
        batch_size=parts.loader.batch_size,
        sampler=parts.loader.sampler,
        num_workers=workers,
        multiprocessing_context="fork",
    )


def main() -> None:
    cast(io.TextIOWrapper, sys.stdout).reconfigure(line_buffering=True, write_through=False)

    def be_faulty_rank(options: dict[str, Any], rank: int) -> None:
        faulthandler.register(signal.SIGQUIT, all_threads=True)
        faults = [Fault(**one) for one in options.get("faults", ())]
        mine = [(index, fault) for index, fault in enumerate(faults) if fault.rank == rank]
        directory = Path(options["directory"])
        moments = Moments(mine, rank=rank, directory=directory, attempt=options["meet"])
        watch(moments)
        moments.reach("start")
        try:
            crew.train(options, rank)
        finally:
            for signo in LATE:  # as at the exit of a process that ends by itself
                signal.signal(signo, signal.SIG_IGN)

    crew.KINDS["run"] = train
    serve(be_faulty_rank)


if __name__ == "__main__":
    main()

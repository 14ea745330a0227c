"""A real training of several ranks (tests/recorded/train_ddp.py) on a real Slurm, and what is done
to it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import is_stopped, wait_until
from sbatchfiles import MULTI_NODE, multi_node_script
from training.trainings import LIMIT_S, RECORDED, Training

from hydroslurm.core.events import Event, EventKind, read_events

LOOPBACK = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
"""The nodes of a dev cluster have no names that could be looked up."""
EPOCHS = 4  # of 60 steps
BATCH_SIZE = 24
EVERY_STEPS = 60
CURTAIN = threading.Event()
"""Nobody wants to know any more."""
AS_IT_IS = MULTI_NODE
# what torchrun's ranks need to write line by line
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}


@dataclass
class RanksTraining(Training):
    """One batch job of several ranks on one cluster.

    Attributes:
        command: what srun starts in sbatch/multi-node.sbatch.
        world: ranks in the first attempt.
        nodes: in the first attempt.
        options: more options for the script.
    """

    epochs: int = EPOCHS
    think_s: float = 0.02
    command: str = AS_IT_IS
    world: int = 4
    nodes: int = 4
    options: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=lambda: {**LOOPBACK, **UNBUFFERED})

    def submit(self, *sbatch_options: str) -> RanksTraining:
        """sbatch/multi-node.sbatch with another command, or as it is."""
        self.folder.mkdir(parents=True)
        (self.folder / "examples").symlink_to(RECORDED)
        script = self.folder / "job.sbatch"
        script.write_text(multi_node_script(self.command, nodes=self.nodes))
        options = script_options(self.out, epochs=self.epochs)
        options += ["--log-every=2", f"--think-s={self.think_s}", *self.options]
        self.job_id = self.slurm("sbatch", "--parsable", *sbatch_options, str(script), *options)
        return self

    def events_of(self, rank: int, *kinds: EventKind, attempt: int | None = None) -> list[Event]:
        """Of one rank, in one attempt or in all. A start that was over before its attempt began
        belongs to none."""
        path = self.run.rank_events(rank)
        found = list(read_events(path)) if path.exists() else []
        if attempt is not None:
            found = _of_attempt(found, attempt)
        return [event for event in found if not kinds or event.kind in kinds]

    @property
    def result(self) -> dict[str, Any]:
        """What it has come to."""
        return dict(json.loads(self.out.read_text()))

    def pid(self, rank: int, *, attempt: int) -> int:
        return self.events_of(rank, EventKind.INSTALLED, attempt=attempt)[-1].pid

    def last_step(self) -> int:
        """The newest in the log."""
        shown = re.findall(r"^epoch \d+ step (\d+)", self.log(), flags=re.MULTILINE)
        return int(shown[-1]) if shown else 0

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """As long as anybody wants to know."""

        def has_come() -> object:
            assert not CURTAIN.is_set(), "the tests are over"
            return condition()

        wait_until(has_come, lambda: f"{what}\n{self.log()}", limit_s=LIMIT_S)

    def wait_for(self, rank: int, kind: EventKind, *, attempt: int) -> None:
        """Until a rank has written such an event in this attempt."""
        self.wait_until(
            lambda: self.events_of(rank, kind, attempt=attempt),
            f"{kind.value} of rank {rank} in attempt {attempt}",
        )

    def wait_for_ranks(self, attempt: int) -> None:
        """Until every rank of this attempt has made a step."""
        for rank in range(self.world):
            self.wait_for(rank, EventKind.FIRST_STEP, attempt=attempt)

    def wait_for_step(self, step: int) -> None:
        """Until its log shows this step; it may be some steps further by then."""
        self.wait_until(lambda: self.last_step() >= step, f"step {step}")

    def wait_for_end(self) -> dict[str, Any]:
        self.wait_until(self.run.finished_json.exists, "the finished marker")
        return self.result

    def suspend(
        self, attempt: int, *, until_stopped: bool, meanwhile: Callable[[], object] | None = None
    ) -> None:
        """scontrol suspend and resume; to be called once per attempt.

        Args:
            until_stopped: until SIGSTOP has come as well, which is after 2 s.
            meanwhile: what is done then.
        """
        self.slurm("scontrol", "suspend", self.job_id)
        # Slurm sends a suspend and the resume behind it to each node without an order: a node that
        # gets the resume first stays suspended for good, in a job that Slurm calls RUNNING
        for rank in range(self.world):
            self.wait_for(rank, EventKind.SIGNAL_RECEIVED, attempt=attempt)
        if until_stopped:
            for rank in range(self.world):
                pid = self.pid(rank, attempt=attempt)
                self.wait_until(lambda pid=pid: is_stopped(pid), f"SIGSTOP to rank {rank}")
        if meanwhile is not None:
            meanwhile()
        self.slurm("scontrol", "resume", self.job_id)
        for rank in range(self.world):
            self.wait_for(rank, EventKind.RESUMED, attempt=attempt)
        # within the two seconds before SIGSTOP Slurm only notes a resume, and a requeue that comes
        # then kills the job step without a word: a suspended one gets no signal
        self.wait_for_step(self.last_step() + 10)

    def requeue(self) -> None:
        self.slurm("scontrol", "requeue", self.job_id)


def script_options(out: Path, *, epochs: int) -> list[str]:
    """The same for a training that is stopped and the one that is compared with it."""
    how = [f"--epochs={epochs}", f"--batch-size={BATCH_SIZE}", f"--every-steps={EVERY_STEPS}"]
    return [*how, f"--out={out}"]


def _of_attempt(events: list[Event], attempt: int) -> list[Event]:
    """Those of the process that has begun it."""
    pids = {
        event.pid
        for event in events
        if event.kind is EventKind.ATTEMPT_BEGAN and event.data["attempt"] == attempt
    }
    return [event for event in events if event.pid in pids]

"""What a TrainingJob is on Slurm: nodes, tasks, and what each task runs.

A plan is made once, at the submission (:mod:`hydroslurm.jobs.launch.layout`), and read from the run
folder by the supervisor and by each task.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Step:
    """A command that runs to its end before the task's own."""

    name: str
    argv: tuple[str, ...]


@dataclass(frozen=True)
class TaskPlan:
    """What one task of the job step runs.

    Attributes:
        replica: such as ``worker-2``.
        type: of the replica.
        node: which of the job's nodes, from 0.
        argv: the program and its arguments.
        env: variables besides those of the job.
        working_directory: absolute.
        init: run before it.
        image: container image, or None.
        is_agent: whether ``argv`` is a torchrun agent and no rank itself.
    """

    replica: str
    type: str
    node: int
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    working_directory: str
    init: tuple[Step, ...] = ()
    image: str | None = None
    is_agent: bool = False


@dataclass(frozen=True)
class Plan:
    """A job as Slurm is asked for it.

    Attributes:
        nodes: how many.
        cpus_per_node, memory_mib_per_node, gpus_per_node: of each; None and 0: not asked for.
        tasks: in the order of their ranks.
        policies: replica type -> restart policy.
        is_debug: the training is not started.
        runtime: what runs the images of the tasks: pyxis, apptainer, or None.
    """

    nodes: int
    cpus_per_node: int
    memory_mib_per_node: int | None
    gpus_per_node: int
    tasks: tuple[TaskPlan, ...]
    policies: tuple[tuple[str, str], ...]
    is_debug: bool = False
    runtime: str | None = None

    @property
    def replicas(self) -> tuple[str, ...]:
        """Names in the order of their ranks; the first is the master."""
        return tuple(dict.fromkeys(task.replica for task in self.tasks))

    @property
    def tasks_per_node(self) -> tuple[int, ...]:
        counts = [0] * self.nodes
        for task in self.tasks:
            counts[task.node] += 1
        return tuple(counts)

    @property
    def is_even(self) -> bool:
        """Whether all nodes have equally many tasks."""
        return len(set(self.tasks_per_node)) == 1

    @property
    def cpus_per_task(self) -> int:
        """What srun gives to each task, on the fullest node."""
        return max(1, self.cpus_per_node // max(self.tasks_per_node))

    def policy_of(self, replica: str) -> str:
        """Its restart policy."""
        kind = next(task.type for task in self.tasks if task.replica == replica)
        return dict(self.policies)[kind]

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def loads(cls, text: str) -> Plan:
        """Read :meth:`dumps` back.

        Raises:
            ValueError, KeyError, TypeError: not written by it.
        """
        value: dict[str, Any] = json.loads(text)
        tasks = tuple(_task(one) for one in value.pop("tasks"))
        policies = tuple((str(kind), str(policy)) for kind, policy in value.pop("policies"))
        return cls(**value, tasks=tasks, policies=policies)


def _task(value: dict[str, Any]) -> TaskPlan:
    value = dict(value)
    return TaskPlan(
        argv=tuple(value.pop("argv")),
        env=tuple((name, text) for name, text in value.pop("env")),
        init=tuple(Step(one["name"], tuple(one["argv"])) for one in value.pop("init")),
        **value,
    )

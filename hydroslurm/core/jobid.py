"""Which job: a plain one, an element of an array, a whole array, a component of a heterogeneous
job. Read and printed as Slurm does it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from hydroslurm.errors import UsageError

_RANGE = r"[0-9]{1,7}(?:-[0-9]{1,7}(?::[1-9][0-9]{0,6})?)?"
_ID = re.compile(
    r"([1-9][0-9]{0,9})"
    rf"(?:_(?P<task>0|[1-9][0-9]{{0,9}})|_\[(?P<tasks>{_RANGE}(?:,{_RANGE})*(?:%[0-9]+)?)\]"
    r"|\+(?P<component>0|[1-9][0-9]{0,9}))?"
)


@dataclass(frozen=True)
class JobId:
    """The name of one job or of several: ``44``, ``44_3``, ``44_[1-3%1]``, ``44+1``.

    Only Slurm knows whether a bare number is a job's own or an array's: the element of an array
    that starts last has the array's number as its own, and Slurm's programs take it for all
    elements. So ``SlurmClient`` acts on jobs that Slurm has described, by their ``Job.id``.

    Attributes:
        number: of the job, of the array, or of a heterogeneous job's leader.
        task: of an element of an array.
        tasks: of several elements, as Slurm prints them between the brackets.
        component: of a heterogeneous job.
    """

    number: int
    task: int | None = None
    tasks: str = ""
    component: int | None = None

    @classmethod
    def parse(cls, text: str) -> JobId:
        """Read an id that a person or Slurm has written.

        Raises:
            UsageError: it is none.
        """
        found = _ID.fullmatch(text)
        if found is None:
            raise UsageError(
                f"{text!r} is no job id; wanted one as Slurm prints it: 44, 44_3 for an element of "
                "an array, 44_[1-3] for several, 44+1 for a component of a heterogeneous job"
            )
        task, component = (
            None if it is None else int(it) for it in found.group("task", "component")
        )
        return cls(int(found[1]), task, found["tasks"] or "", component)

    def __str__(self) -> str:
        if self.task is not None:
            return f"{self.number}_{self.task}"
        if self.tasks:
            return f"{self.number}_[{self.tasks}]"
        return f"{self.number}" if self.component is None else f"{self.number}+{self.component}"

    @property
    def argument(self) -> str:
        """As scontrol and scancel take it: without an array's throttle; the leader of a
        heterogeneous job stands for all its components."""
        if self.component == 0:
            return f"{self.number}"
        return str(replace(self, tasks=self.tasks.partition("%")[0]))

    @property
    def leader(self) -> str:
        """The same where Slurm takes no single component: suspend, resume, requeue."""
        return self.argument if self.component is None else f"{self.number}"

    def common(self, other: JobId) -> JobId | None:
        """What both name of one array or heterogeneous job; None if that is nothing. A bare number
        has only itself in common with others: whose it is Slurm alone knows."""
        if self == other:
            return self
        theirs = other._tasks() if other.number == self.number else []
        tasks = [task for some in self._tasks() for task in some if any(task in r for r in theirs)]
        if len(tasks) == 1:
            return JobId(self.number, tasks[0])
        return JobId(self.number, tasks=",".join(map(str, tasks))) if tasks else None

    def _tasks(self) -> list[range]:
        if self.task is not None:
            return [range(self.task, self.task + 1)]
        found = []
        for part in filter(None, self.tasks.partition("%")[0].split(",")):
            ends, _, stride = part.partition(":")
            first, _, last = ends.partition("-")
            found.append(range(int(first), int(last or first) + 1, int(stride or 1)))
        return found

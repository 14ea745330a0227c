"""What a job consists of: tasks in groups, their outputs, stop signals, and a local session."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from hydroslurm.errors import UsageError

if TYPE_CHECKING:
    from hydroslurm.compat.job import Job


class Client(Protocol):
    """Runs what it is given by calling it. Caffe2's sessions are such."""

    def run(self, runnable: Callable[[], Any], /) -> Any: ...


class Task:
    """One function of a job, in the group in whose ``with`` it is made.

        with job.init_group:
            Task(step=pretrain)

    Attributes:
        name: for messages.
        function: called with the job, or with nothing.
        takes_job: it has a parameter, which is given the job.
        node: for whom Caffe2 would run it; here all ranks run all tasks. What
            ``job.nodes_to_checkpoint()`` lists.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        group: TaskGroup | None = None,
        node: str = "local",
        name: str | None = None,
    ) -> None:
        """``group``: instead of that of the ``with``. Outside of all it is in none.

        Raises:
            UsageError: not callable, or it needs more than the job.
        """
        if not callable(step):
            raise UsageError(f"a job consists of functions, not of {type(step).__name__}")
        self.name = name or name_of(step)
        self.function = step
        self.takes_job = _takes_job(step, self.name)
        self.node = node
        self._output: TaskOutput | None = None
        group = group or innermost_group()
        if group is not None:
            group.add(self)

    def has_output(self, output: object) -> bool:
        """Whether this is what the function returns."""
        return output is not None and output is self._output

    def outputs(self) -> tuple[TaskOutput, ...]:
        """What the function returns, one value; kept from here on."""
        self._output = self._output or TaskOutput(self.name)
        return (self._output,)

    def __call__(self, job: Job | None = None) -> Any:
        value = self.function(job) if self.takes_job else self.function()
        if self._output is not None:
            self._output.set(value)
        return value


class TaskOutput:
    """What a task has returned. As a stop signal it is looked at after each epoch."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._value: tuple[Any, ...] = ()

    def fetch(self) -> Any:
        """The value of the last call.

        Raises:
            UsageError: there was none.
        """
        if not self._value:
            raise UsageError(f"the task {self._name} has not run, so that it has no output")
        return self._value[0]

    def set(self, value: Any) -> None:
        """The task has returned this, now or in the attempt before."""
        self._value = (value,)

    def __call__(self) -> bool:
        """As a stop signal; before the first call it is not true."""
        return bool(self._value and self._value[0])

    def __getstate__(self) -> dict[str, Any]:
        return {"_name": self._name, "_value": ()}


class TaskGroup:
    """Tasks that are run in order. A context: a :class:`Task` made within belongs to it.

    It is called by the client that it is handed to, ``client.run(group)``. While a JobRunner runs
    its job that one decides what is left to do; called by hand, it runs every task.
    """

    def __init__(self, name: str = "group") -> None:
        self.name = name
        self.job: Job | None = None
        self._tasks: list[Task] = []
        self._walk: Callable[[], None] | None = None

    def add(self, task: Task) -> None:
        """Append a task.

        Raises:
            UsageError: the job runs, and its state is loaded.
        """
        if self.job is not None:
            self.job.check_open(f"{self.name}({task.name})")
        self._tasks.append(task)

    def tasks(self) -> tuple[Task, ...]:
        """In order."""
        return tuple(self._tasks)

    def used_nodes(self) -> tuple[str, ...]:
        """The nodes of its tasks, each once."""
        return tuple(dict.fromkeys(task.node for task in self._tasks))

    def run_by(self, client: Client, walk: Callable[[], None]) -> None:
        """Hand it to a client, to whom a call of it means this."""
        self._walk = walk
        try:
            client.run(self)
        finally:
            self._walk = None

    def __enter__(self) -> TaskGroup:
        _groups().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _groups().pop()

    def __call__(self) -> None:
        if self._walk is not None:
            self._walk()
            return
        for task in self._tasks:
            task(self.job)

    def __repr__(self) -> str:
        return f"TaskGroup({self.name!r})"


def innermost_group() -> TaskGroup | None:
    """That of the innermost ``with`` of this thread."""
    return _groups()[-1] if _groups() else None


def name_of(function: Any) -> str:
    """What a function is called in messages."""
    return str(getattr(function, "__name__", None) or type(function).__name__)


def _takes_job(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # some builtins do not tell
        return False
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    by_keyword = any(
        parameter.kind is parameter.KEYWORD_ONLY and parameter.name in needed
        for parameter in parameters
    )
    if len(needed) > 1 or by_keyword:
        raise UsageError(
            f"{name} needs {', '.join(needed)}; a job calls its functions with itself, or with "
            "nothing. Bind the rest with functools.partial"
        )
    return len(needed) == 1


_local = threading.local()


def _groups() -> list[TaskGroup]:
    if not hasattr(_local, "groups"):
        _local.groups = []
    groups: list[TaskGroup] = _local.groups
    return groups


class Group(str, Enum):
    """The groups of a job, in the order in which they run."""

    DOWNLOAD = "download"
    BUILD = "build"
    INIT = "init"
    EPOCH = "epoch"
    EXIT = "exit"


class LocalSession:
    """Runs groups in this process.

    It remembers whose group it ran last, as Caffe2's has that job's blobs in its workspace: what a
    manager saves and loads by it belongs to that job.
    """

    def __init__(self) -> None:
        self._job: Job | None = None

    @classmethod
    def compile(cls, group: TaskGroup) -> TaskGroup:
        """The same group: a function needs no preparation to run here."""
        return group

    def run(self, runnable: Callable[[], Any]) -> Any:
        """Call it."""
        if isinstance(runnable, TaskGroup) and runnable.job is not None:
            self._job = runnable.job
        with nullcontext() if self._job is None else self._job.as_current():
            return runnable()


@dataclass(frozen=True)
class ValueSignal:
    """A stop signal that is no function: a number, a flag, or a tensor of one element."""

    value: Any

    @classmethod
    def of(cls, value: Any) -> ValueSignal:
        """Raises:
        UsageError: it is neither true nor false, or would always be true.
        """
        try:
            if isinstance(value, (bool, int, float)) or hasattr(value, "is_set"):
                return cls(value)
            value.item()
        except (AttributeError, RuntimeError, ValueError) as error:
            raise UsageError(
                f"add_stop_signal({type(value).__name__}): wanted a function, the output of a "
                "task, a number, a flag (threading.Event), or a tensor of one element"
            ) from error
        return cls(value)

    def __call__(self) -> bool:
        return bool(self.value.is_set() if hasattr(self.value, "is_set") else self.value)


@dataclass(frozen=True)
class EpochLimit:
    """True when so many epochs are done. Made by :func:`epoch_limiter`; can be pickled."""

    epochs: int

    def __call__(self, job: Job) -> bool:
        return job.run.epoch >= self.epochs


def epoch_limiter(epochs: int) -> EpochLimit:
    """A stop signal that ends a job when so many epochs are done.

        job.add_stop_signal(hydroslurm.epoch_limiter(10))

    Within ``with Job()`` it adds itself to that job, as Caffe2's does; adding it again changes
    nothing.

    Raises:
        UsageError: not a whole number of 1 or more.
    """
    if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1:
        raise UsageError(f"epoch_limiter({epochs!r}): wanted a whole number of 1 or more")
    from hydroslurm.compat.job import innermost_job  # which needs the tasks above

    limit = EpochLimit(epochs)
    job = innermost_job()
    if job is not None and not job.is_running:
        job.add_stop_signal(limit)
    return limit

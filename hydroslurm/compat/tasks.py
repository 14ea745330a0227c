"""The parts of a job: tasks in groups, their outputs, stop signals, and a local session."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from hydroslurm.errors import UsageError

if TYPE_CHECKING:
    from hydroslurm.compat.job import Job


class Within(threading.local):
    """Objects of this thread's ``with`` blocks, the innermost last."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    @property
    def innermost(self) -> Any:
        return self.all[-1] if self.all else None


_groups, jobs = Within(), Within()


class Client(Protocol):
    """Runs callables, like Caffe2's sessions."""

    def run(self, runnable: Callable[[], Any], /) -> Any: ...


class Task:
    """One function of a job. It joins the group in whose ``with`` it is created.

        with job.init_group:
            Task(step=pretrain)

    Attributes:
        name: for messages.
        function: called with the job, or with nothing.
        takes_job: it has a parameter, to which the job is passed.
        node: where Caffe2 would run it; here all ranks run all tasks. Listed by
            ``job.nodes_to_checkpoint()``.
        output: what :meth:`outputs` records, or None.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        group: TaskGroup | None = None,
        node: str = "local",
        name: str | None = None,
    ) -> None:
        """``group``: overrides that of the ``with``; without either the task is in no group.

        Raises:
            UsageError: not callable, or it needs more arguments than the job.
        """
        if not callable(step):
            raise UsageError(f"a job consists of functions, not of {type(step).__name__}")
        self.name = name or name_of(step)
        self.function = step
        self.takes_job = _takes_job(step, self.name)
        self.node = node
        self.output: TaskOutput | None = None
        self._group = group or _groups.innermost
        if self._group is not None:
            self._group.add(self)

    def outputs(self) -> tuple[TaskOutput, ...]:
        """Return the function's output, one value; it is recorded from now on."""
        self.output = self.output or TaskOutput(self.name)
        return (self.output,)

    def fetch(self) -> bool:
        """As a stop signal: ask it.

        Raises:
            UsageError: it needs a running job, as an epoch limit does.
        """
        return bool(self(self._group.job))

    def __call__(self, job: Job | None = None) -> Any:
        value = self.function(job) if self.takes_job else self.function()
        if self.output is not None:
            self.output.set(value)
        return value


class TaskOutput:
    """The return value of a task. As a stop signal it is evaluated after each epoch."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._value: tuple[Any, ...] = ()

    def fetch(self) -> Any:
        """Return the value of the last call.

        Raises:
            UsageError: it has not been called.
        """
        if not self._value:
            raise UsageError(f"the task {self._name} has not run, so it has no output")
        return self._value[0]

    def set(self, value: Any) -> None:
        """Record the task's return value, from now or the previous attempt."""
        self._value = (value,)

    def __call__(self) -> bool:
        """Return its truth as a stop signal; False before the first call."""
        return bool(self._value and self._value[0])

    def __getstate__(self) -> dict[str, Any]:
        return {"_name": self._name, "_value": ()}


class TaskGroup:
    """Tasks that run in order. A context manager: a :class:`Task` made inside belongs to it.

    A client runs it by calling it, ``client.run(group)``. While a JobRunner runs its job, that
    decides which tasks remain; called directly, the group runs every task.
    """

    def __init__(self, name: str = "group") -> None:
        self.name = name
        self.job: Job | None = None
        self._tasks: list[Task] = []
        self._walk: Callable[[TaskGroup], None] | None = None

    def add(self, task: Task) -> None:
        """Append a task.

        Raises:
            UsageError: the job is running, and its state is loaded.
        """
        if self.job is not None:
            self.job.check_open(f"{self.name}({task.name})")
        self._tasks.append(task)

    def tasks(self) -> tuple[Task, ...]:
        """Its tasks, in order."""
        return tuple(self._tasks)

    def used_nodes(self) -> tuple[str, ...]:
        """The nodes of its tasks, each once."""
        return tuple(dict.fromkeys(task.node for task in self._tasks))

    def run_by(self, client: Client, walk: Callable[[TaskGroup], None]) -> None:
        """Let a client run it, with ``walk`` in place of its tasks."""
        self._walk = walk
        try:
            client.run(self)
        finally:
            self._walk = None

    def __enter__(self) -> TaskGroup:
        _groups.all.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _groups.all.pop()

    def __call__(self) -> None:
        if self._walk is not None:
            self._walk(self)
            return
        for task in self._tasks:
            task(self.job)

    def __repr__(self) -> str:
        return f"TaskGroup({self.name!r})"


def name_of(function: Any) -> str:
    """Return a function's name for messages."""
    return str(getattr(function, "__name__", None) or type(function).__name__)


def _takes_job(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # some builtins have no signature
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


class LocalSession:
    """Runs groups in this process.

    Like the workspace of Caffe2's, it remembers whose group it ran last: a manager that it runs
    saves and loads that job's objects.
    """

    def __init__(self) -> None:
        self._job: Job | None = None

    @classmethod
    def compile(cls, group: TaskGroup) -> TaskGroup:
        """Return the same group: a function needs no preparation to run here."""
        return group

    def run(self, runnable: Callable[[], Any]) -> Any:
        """Call it."""
        if isinstance(runnable, TaskGroup) and runnable.job is not None:
            self._job = runnable.job
        with nullcontext() if self._job is None else self._job.as_current():
            return runnable()


def function_of(signal: Any) -> Callable[..., Any]:
    """Return a stop signal's function: itself, or the truth of a number, flag or tensor.

    Raises:
        UsageError: its truth value is undefined.
    """
    if callable(signal):
        return signal  # type: ignore[no-any-return]
    try:
        if not (isinstance(signal, (bool, int, float)) or hasattr(signal, "is_set")):
            signal.item()
    except (AttributeError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"add_stop_signal({type(signal).__name__}): wanted a function, the output of a "
            "task, a number, a flag (threading.Event), or a one-element tensor"
        ) from error
    return partial(_truth, signal)


def _truth(signal: Any) -> bool:
    return bool(signal.is_set() if hasattr(signal, "is_set") else signal)


def epoch_limiter(epochs: int | Job, num_epochs: int | None = None) -> Callable[[Job], bool]:
    """A stop signal that ends a job after this many epochs.

        job.add_stop_signal(hydroslurm.epoch_limiter(10))

    Inside ``with Job()`` it adds itself to that job, as Caffe2's does; adding it again has no
    effect. Later versions of Caffe2 name the job first: ``epoch_limiter(job, 10)``.

    Raises:
        UsageError: not an integer of 1 or more.
    """
    job: Any = jobs.innermost if num_epochs is None else epochs
    count = epochs if num_epochs is None else num_epochs
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UsageError(f"epoch_limiter({count!r}): wanted a whole number of 1 or more")
    limit = partial(_has_completed, count)
    if job is not None and not job.is_running:
        job.add_stop_signal(limit)
    return limit


def _has_completed(epochs: int, job: Job) -> bool:
    return job.run.epoch >= epochs

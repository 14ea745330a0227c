"""``Job``: a training run described as groups of functions, which a JobRunner runs.

    with hydroslurm.Job("digits") as job:

        @job.build
        def objects(job):                       # in every attempt
            model = make_model()
            job.save("model", model)
            job.save("optimizer", torch.optim.AdamW(model.parameters()))
            job.loader = make_loader()

        @job.epoch
        def train(job):                         # until a stop signal is true
            for images, labels in job.run.epoch_batches():
                ...

        job.add_stop_signal(hydroslurm.epoch_limiter(10))

Modeled on Caffe2's class of the same name, with one more group. There the state consists of blobs,
which a checkpoint recreates, so ``init`` can make them and be skipped on resume. Here an object has
to exist before its state can be loaded: ``build`` makes the objects in every attempt, and ``init``
does what must be done only once. Caffe2's own spelling works as well:

    with Job() as job:                          # tasks made here belong to the epoch group
        model = job.save("model", make_model())
        with Job.current().init_group:
            Task(step=pretrain)
        Task(step=train)
        epoch_limiter(10)                       # adds itself
    job.compile(LocalSession)
    JobRunner(job, CheckpointManager("runs/a"))(LocalSession())
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import cloudpickle

from hydroslurm.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Self

    from hydroslurm.compat.jobrunner import JobRun

Function = TypeVar("Function", bound=Callable[..., Any])
Signal = TypeVar("Signal")


class _Thread(threading.local):
    """What this thread is doing.

    Attributes:
        within: job and group of each open ``with`` block, the innermost last.
        pickles: compiled jobs that are being pickled.
    """

    def __init__(self) -> None:
        self.within: list[tuple[Job | None, TaskGroup | None]] = [(None, None)]
        self.pickles: list[Job] = []


_here = _Thread()


def innermost_job() -> Job | None:
    """The job of this thread's innermost ``with``, or the one it is running."""
    return _here.within[-1][0]


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
        records: whether :meth:`fetch` has the return value of the last call; see :meth:`outputs`.
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
        self.name = name or _name_of(step)
        self.function = step
        self.takes_job = _takes_job(step, self.name)
        self.node = node
        self.records = False
        self._value: tuple[Any, ...] = ()
        self._group = group or _here.within[-1][1]
        if self._group is not None:
            self._group.add(self)

    def outputs(self) -> tuple[Task, ...]:
        """Return the one output, which is the task itself: its return value is recorded from now
        on. As a stop signal it is read after each epoch."""
        self.records = True
        return (self,)

    def fetch(self) -> Any:
        """Return the value of the last call. A stop signal that is no output is asked now.

        Raises:
            UsageError: the task has not run, or the signal needs a running job, as an epoch limit
                does.
        """
        if not self.records:
            return bool(self(None if self._group is None else self._group.job))
        if not self._value:
            raise UsageError(f"the task {self.name} has not run, so it has no output")
        return self._value[0]

    def set(self, value: Any) -> None:
        """Record the return value, of now or of an earlier attempt."""
        self._value = (value,)

    def ends_job(self) -> bool:
        """Whether it says so, as a stop signal; an output does not before the first call."""
        return bool((self._value or not self.records) and self.fetch())

    def __call__(self, job: Job | None = None) -> Any:
        value = self.function(job) if self.takes_job else self.function()
        if self.records:
            self.set(value)
        return value

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_value": ()}


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)


def _takes_job(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # some builtins have no signature
        return False
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p for p in parameters if p.default is p.empty and p.kind not in optional]
    if len(needed) > 1 or any(p.kind is p.KEYWORD_ONLY for p in needed):
        raise UsageError(
            f"{name} needs {', '.join(p.name for p in needed)}; a job calls its functions with "
            "itself, or with nothing. Bind the rest with functools.partial"
        )
    return bool(needed)


class TaskGroup:
    """Tasks that run in order. A context manager: a :class:`Task` made inside belongs to it.

    A client runs it by calling it, ``client.run(group)``. While a JobRunner runs its job, that
    decides which tasks remain; otherwise the group runs every task.
    """

    def __init__(self, name: str = "group") -> None:
        self.name = name
        self.job: Job | None = None
        self._tasks: list[Task] = []

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

    def __enter__(self) -> TaskGroup:
        _here.within.append((innermost_job(), self))
        return self

    def __exit__(self, *_: object) -> None:
        _here.within.pop()

    def __call__(self) -> None:
        job = self.job
        with nullcontext() if job is None else job.as_current():
            if job is not None and job.is_running:
                job.run.walk(self)
            else:
                for task in self._tasks:
                    task(job)

    def __repr__(self) -> str:
        return f"TaskGroup({self.name!r})"


def group_of(function: Callable[[], Any], name: str) -> TaskGroup:
    """Return a group of one function; both have this name."""
    group = TaskGroup(name)
    Task(function, group=group, name=name)
    return group


_GROUPS = (
    "fetch_group", "build_group", "init_group", "epoch_group", "download_group", "exit_group",
)  # fmt: skip


class Job:
    """Groups of functions, each called in the order in which it was registered.

    =========  ====================================================================================
    download   in every attempt, first, on rank 0: fetches data, unless it is already there
    build      in every attempt: makes the objects, names those to be saved, sets the loader
    init       once per run, after ``build``: pretrained weights, a first evaluation. If it is
               interrupted, nothing of it remains, and the next attempt starts it over
    epoch      repeatedly, until a stop signal is true after an epoch
    exit       after the last epoch, and after Caffe2's ``download_group``, which collects what the
               epochs have made. If one is interrupted, the next attempt starts it over; once
               ``exit`` is done, neither runs again
    =========  ====================================================================================

    A function takes the job, or nothing. One thread registers functions and runs the job. While not
    running, a job can be pickled, together with any function that the pickler supports.

    Functions that run in another process must use the job passed to them: a global of their module
    may be a different object there.

    Attributes:
        init_group, epoch_group, exit_group: context managers: tasks made inside belong to them.
        download_group: runs after the last epoch, before ``exit_group``. What runs first, and
            fetches data, is ``fetch_group``, the functions of :meth:`download`.
        build_group: the functions of :meth:`build`.
    """

    def __init__(
        self,
        name: str | TaskGroup | None = "job",
        epoch_group: TaskGroup | None = None,
        exit_group: TaskGroup | None = None,
        stop_signals: Iterable[Any] | None = None,
        nodes_to_checkpoint: Iterable[str] | None = None,
        *,
        init_group: TaskGroup | None = None,
        download_group: TaskGroup | None = None,
        stop_conditions: Iterable[Any] | None = None,
    ) -> None:
        """Groups default to empty ones. ``name`` may be the ``init_group``, Caffe2's first
        argument. ``nodes_to_checkpoint``: for :meth:`nodes_to_checkpoint`. ``stop_conditions``: the
        ``stop_signals`` in later versions of Caffe2."""
        if isinstance(name, TaskGroup):
            init_group = name
        self.name = name if isinstance(name, str) else "job"
        self.fetch_group, self.build_group = TaskGroup("download"), TaskGroup("build")
        self.init_group = init_group or TaskGroup("init")
        self.epoch_group = epoch_group or TaskGroup("epoch")
        self.download_group = download_group or TaskGroup("download_group")
        self.exit_group = exit_group or TaskGroup("exit")
        self._signals = TaskGroup("add_stop_signal")
        for group in (*self._groups(), self._signals):
            group.job = self
        self._nodes = None if nodes_to_checkpoint is None else tuple(nodes_to_checkpoint)
        self._saved: dict[str, Any] = {}
        self._loader: Any = None
        self._run: JobRun | None = None
        self._is_compiled = False
        for signal in (*(stop_signals or ()), *(stop_conditions or ())):
            self.add_stop_signal(signal)

    @classmethod
    def current(cls) -> Job:
        """The job of this thread's innermost ``with``, or the one it is running.

        Raises:
            UsageError: there is none.
        """
        job = innermost_job()
        if job is None:
            raise UsageError("there is no current job here; use this inside `with Job() as job:`")
        return job

    def __enter__(self) -> Job:
        """Make this the current job; tasks made inside belong to its epoch group."""
        _here.within.append((self, self.epoch_group))
        return self

    def __exit__(self, *_: object) -> None:
        _here.within.pop()

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Make this the current job; tasks made inside belong to none of its groups."""
        _here.within.append((self, None))
        try:
            yield
        finally:
            _here.within.pop()

    def save(self, name: str, thing: Any) -> Any:
        """Register an object to be saved under this name, and return it.

        To be called in ``build``, or before the job runs.

        Raises:
            UsageError: too late, the name is taken, or the object lacks ``state_dict`` or
                ``load_state_dict``.
        """
        self.check_open(f"save({name!r})")
        if name in self._saved:
            raise UsageError(f"{name!r} is already registered; give the second object its own name")
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise UsageError(
                f"{name!r} is a {type(thing).__name__} without state_dict() and load_state_dict(); "
                "only objects that have both can be saved. Wrap it in one that does"
            )
        self._saved[name] = thing
        return thing

    @property
    def loader(self) -> Any:
        """Source of ``job.run.epoch_batches()``, or None; set it in ``build``, or before the job
        runs."""
        return self._loader

    @loader.setter
    def loader(self, loader: Any) -> None:
        self.check_open("setting the loader")
        self._loader = loader

    def download(self, function: Function) -> Function:
        """Add a function that fetches data; a decorator, like the four others."""
        return _added(self.fetch_group, function)

    def build(self, function: Function) -> Function:
        """Add a function that makes objects."""
        return _added(self.build_group, function)

    def init(self, function: Function) -> Function:
        """Add a function that runs once per run."""
        return _added(self.init_group, function)

    def epoch(self, function: Function) -> Function:
        """Add a function that is part of each epoch.

        It iterates its data with ``job.run.epoch_batches()``, at most once. If a stop
        interrupts it, the next attempt calls it again, and its loop gets the remaining batches;
        whatever it does before the loop is repeated. It must set whatever is not part of the saved
        state itself, such as ``model.train()`` after an evaluation.
        """
        return _added(self.epoch_group, function)

    def exit(self, function: Function) -> Function:
        """Add a function that runs after the last epoch."""
        return _added(self.exit_group, function)

    def add_stop_signal(self, signal: Signal) -> Signal:
        """Add a function that says after each epoch whether it was the last; or a task's output, a
        flag or a one-element tensor, which is read then.

        ``job.run.epoch`` is then the number of completed epochs. All signals are evaluated each
        time; one that is true suffices. A signal should depend only on saved state, or it may
        answer differently after a restart: an output is saved with the job, a flag or a tensor is
        not.
        """
        if any(signal is added or signal is added.function for added in self.stop_signals):
            return signal
        if isinstance(signal, Task):
            self._signals.add(signal)
        else:
            Task(_function_of(signal), group=self._signals)
        return signal

    add_stop_condition = add_stop_signal
    """Name in later versions of Caffe2."""

    def compile(self, session: Any) -> Self:
        """Compile every group with a session and fix the nodes; return the job itself. Plain pickle
        can then pickle it with all its functions, closures included.

        Args:
            session: a class or an object with ``compile(group)``, which returns a group or another
                callable; without that method the groups stay as they are.

        Raises:
            UsageError: the job is running, or the result is not callable.
        """
        self.check_open(f"compile({_name_of(session)})")
        for name in _GROUPS if hasattr(session, "compile") else ():
            if (group := getattr(self, name)).tasks():
                compiled = session.compile(group)
                if not isinstance(compiled, TaskGroup):
                    function, compiled = compiled, TaskGroup(group.name)
                    Task(function, group=compiled)
                compiled.job = self
                setattr(self, name, compiled)
        self._nodes = self.nodes_to_checkpoint()
        self._is_compiled = True
        return self

    def __getitem__(self, name: str) -> Any:
        """Return an object that was registered with :meth:`save`."""
        if name not in self._saved:
            has = ", ".join(self._saved) or "nothing yet"
            raise UsageError(f"nothing is registered as {name!r} in {self!r}; it has {has}")
        return self._saved[name]

    def names(self) -> tuple[str, ...]:
        """The names of all saved objects. Complete after ``build``."""
        return tuple(self._saved)

    def nodes_to_checkpoint(self) -> tuple[str, ...]:
        """The nodes given to the constructor, else those of the init group's tasks. Names for a
        manager's ``init``: every rank saves its part regardless."""
        return self.init_group.used_nodes() if self._nodes is None else self._nodes

    @property
    def stop_signals(self) -> tuple[Task, ...]:
        """Conditions that end the job, in order. ``fetch()`` of each says, after an epoch, whether
        that was the last one."""
        return self._signals.tasks()

    stop_conditions = stop_signals
    """Name in later versions of Caffe2."""

    def signal_outputs(self) -> dict[str, Task]:
        """Index in the epoch group -> the task there, if its output is a stop signal."""
        tasks = enumerate(self.epoch_group.tasks())
        return {str(n): task for n, task in tasks if task.records and task in self.stop_signals}

    def ask_stop_signals(self) -> bool:
        """Whether the completed epoch was the last one."""
        answers = [signal.ends_job() for signal in self.stop_signals]
        return any(answers)

    def signature(self) -> tuple[str, ...]:
        """Return the names of the job and its functions: two jobs of one script differ in them."""
        return (self.name, *(task.name for group in self._groups() for task in group.tasks()))

    @property
    def is_running(self) -> bool:
        """Whether a JobRunner is running it."""
        return self._run is not None

    @property
    def run(self) -> JobRun:
        """The Run of this attempt: steps, the batches of the epoch, safe points.

        Raises:
            UsageError: the job is not running.
        """
        if self._run is None:
            raise UsageError(f"{self!r} is not running; JobRunner(job).run() runs it")
        return self._run

    def check(self) -> None:
        """Check that it can run.

        Raises:
            UsageError: it is already running, has no epoch, or would never end.
        """
        if self._run is not None:
            raise UsageError(f"{self!r} is already running")
        if not self.epoch_group.tasks():
            raise UsageError(
                f"{self!r} has no function in its epoch group; add one with @job.epoch"
            )
        if not self._signals.tasks():
            raise UsageError(
                f"{self!r} has no stop signal and would never end; "
                "job.add_stop_signal(hydroslurm.epoch_limiter(10)) ends it after ten epochs"
            )

    @contextmanager
    def running(self, run: JobRun) -> Iterator[None]:
        """Attach the Run and make this the current job; afterwards forget ``build``'s objects."""
        saved, loader = dict(self._saved), self._loader
        self._run = run
        try:
            with self.as_current():
                yield
        finally:
            self._run, self._saved, self._loader = None, saved, loader

    def check_open(self, what: str) -> None:
        """Check that something can still be added.

        Raises:
            UsageError: the objects are already built and loaded.
        """
        if self._run is not None and self._run.is_built:
            raise UsageError(
                f"{what} comes too late: the objects of {self!r} are built and its state "
                "is loaded. Do it in a function of the build group, or before the job runs"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a compiled job as a whole by cloudpickle, which supports closures: the job and its
        functions refer to each other."""
        if not self._is_compiled or self in _here.pickles:
            return super().__reduce_ex__(protocol)
        _here.pickles.append(self)
        try:
            return cloudpickle.loads, (cloudpickle.dumps(self),)
        finally:
            _here.pickles.pop()

    def __getstate__(self) -> dict[str, Any]:
        if self._run is not None:
            raise UsageError(
                f"{self!r} is running, and a running job cannot be pickled: do it before it runs; "
                "its state is in its checkpoints"
            )
        return dict(vars(self))

    def _groups(self) -> list[TaskGroup]:
        return [getattr(self, name) for name in _GROUPS]

    def __repr__(self) -> str:
        return f"Job({self.name!r})"


def _added(group: TaskGroup, function: Function) -> Function:
    Task(function, group=group)
    return function


def _function_of(signal: Any) -> Callable[..., Any]:
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
    job: Any = innermost_job() if num_epochs is None else epochs
    count = epochs if num_epochs is None else num_epochs
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UsageError(f"epoch_limiter({count!r}): wanted a whole number of 1 or more")
    limit = partial(_has_completed, count)
    if job is not None and not job.is_running:
        job.add_stop_signal(limit)
    return limit


def _has_completed(epochs: int, job: Job) -> bool:
    return job.run.epoch >= epochs


class LocalSession:
    """Runs groups in this process."""

    @classmethod
    def compile(cls, group: TaskGroup) -> TaskGroup:
        """Return the same group: a function needs no preparation to run here."""
        return group

    def run(self, runnable: Callable[[], Any]) -> Any:
        """Call it."""
        return runnable()

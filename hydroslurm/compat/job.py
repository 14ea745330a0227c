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

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle

from hydroslurm.compat.tasks import Task, TaskGroup, TaskOutput, Within, function_of, jobs, name_of
from hydroslurm.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Self

    from hydroslurm.compat.jobrunner import JobRun

Function = TypeVar("Function", bound=Callable[..., Any])
Signal = TypeVar("Signal")
_GROUPS = (
    "fetch_group", "build_group", "init_group", "epoch_group", "download_group", "exit_group",
)  # fmt: skip
_packing = Within()
"""Jobs that are being pickled."""


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
        for group in self._groups():
            group.job = self
        self._nodes = None if nodes_to_checkpoint is None else tuple(nodes_to_checkpoint)
        self._is_compiled = False
        self._signals = TaskGroup("add_stop_signal")
        self._signals.job = self
        self._saved: dict[str, Any] = {}
        self._loader: Any = None
        self._run: JobRun | None = None
        self._sealed = False
        for signal in (*(stop_signals or ()), *(stop_conditions or ())):
            self.add_stop_signal(signal)

    # --- registering
    # --------------------------------------------------------------------------------------------

    @classmethod
    def current(cls) -> Job:
        """The job of this thread's innermost ``with``, or the one it is running.

        Raises:
            UsageError: there is none.
        """
        job: Job | None = jobs.innermost
        if job is None:
            raise UsageError("there is no current job here; use this inside `with Job() as job:`")
        return job

    def __enter__(self) -> Job:
        """Make this the current job; tasks made inside belong to its epoch group."""
        jobs.all.append(self)
        self.epoch_group.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.epoch_group.__exit__()
        jobs.all.pop()

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Make this the current job; tasks made inside belong to none of its groups."""
        jobs.all.append(self)
        try:
            yield
        finally:
            jobs.all.pop()

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
        if not any(added.function is signal for added in self._signals.tasks()):
            Task(function_of(signal), group=self._signals)
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
        self.check_open(f"compile({name_of(session)})")
        compile_group = getattr(session, "compile", None)
        for name in _GROUPS:
            if compile_group is not None and (group := getattr(self, name)).tasks():
                setattr(self, name, self._as_group(compile_group(group), group.name))
        self._nodes = self.nodes_to_checkpoint()
        self._is_compiled = True
        return self

    def _as_group(self, compiled: Any, name: str) -> TaskGroup:
        if isinstance(compiled, TaskGroup):
            group = compiled
        else:
            group = TaskGroup(name)
            Task(compiled, group=group)
        group.job = self
        return group

    # --- looking
    # --------------------------------------------------------------------------------------------

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

    def signal_outputs(self) -> dict[str, TaskOutput]:
        """Index in the epoch group -> the output of that task, for those that are stop signals."""
        asked = [signal.function for signal in self._signals.tasks()]
        return {
            str(number): task.output
            for number, task in enumerate(self.epoch_group.tasks())
            if task.output is not None and any(task.output is a for a in asked)
        }

    @property
    def stop_signals(self) -> tuple[TaskOutput | Task, ...]:
        """Conditions that end the job, in order. ``fetch()`` of each says, after an epoch, whether
        that was the last one."""
        return tuple(
            signal.function if isinstance(signal.function, TaskOutput) else signal
            for signal in self._signals.tasks()
        )

    stop_conditions = stop_signals
    """Name in later versions of Caffe2."""

    def ask_stop_signals(self) -> bool:
        """Whether the completed epoch was the last one."""
        answers = [signal.fetch() for signal in self._signals.tasks()]
        return any(answers)

    def signature(self) -> tuple[str, ...]:
        """Return the names of the job and its functions: two jobs of one script differ in them."""
        tasks = [task for group in self._groups() for task in group.tasks()]
        return (self.name, *(task.name for task in tasks))

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

    def _groups(self) -> list[TaskGroup]:
        return [getattr(self, name) for name in _GROUPS]

    def __repr__(self) -> str:
        return f"Job({self.name!r})"

    # --- for the runner
    # --------------------------------------------------------------------------------------------

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
            self._sealed = False

    def seal(self) -> None:
        """Mark ``build`` as done: nothing more can be registered."""
        self._sealed = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a compiled job as a whole by cloudpickle, which supports closures: the job and its
        functions refer to each other."""
        if not self._is_compiled or self in _packing.all:
            return super().__reduce_ex__(protocol)
        _packing.all.append(self)
        try:
            return cloudpickle.loads, (cloudpickle.dumps(self),)
        finally:
            _packing.all.pop()

    def __getstate__(self) -> dict[str, Any]:
        if self._run is not None:
            raise UsageError(
                f"{self!r} is running, and a running job cannot be pickled: do it before it runs; "
                "its state is in its checkpoints"
            )
        return dict(vars(self))

    def check_open(self, what: str) -> None:
        """Check that something can still be added.

        Raises:
            UsageError: the objects are already built and loaded.
        """
        if self._sealed:
            raise UsageError(
                f"{what} comes too late: the objects of {self!r} are built and its state "
                "is loaded. Do it in a function of the build group, or before the job runs"
            )


def _added(group: TaskGroup, function: Function) -> Function:
    Task(function, group=group)
    return function

"""``Job``: a training described as groups of functions, which a JobRunner runs.

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

After Caffe2's class of the same name, with one more group. There the state consists of blobs, which
a checkpoint recreates, so ``init`` can make them and be skipped on a resume. Here an object has to
exist before its state can be loaded into it: ``build`` makes the objects in every attempt, and
``init`` does what has to be done only once. Caffe2's own spelling works as well:

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

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle

from hydroslurm.compat.tasks import Group, Task, TaskGroup, TaskOutput, ValueSignal, name_of
from hydroslurm.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Self

    from hydroslurm.compat.jobrun import JobRun

Function = TypeVar("Function", bound=Callable[..., Any])
Signal = TypeVar("Signal")


class Job:
    """Groups of functions, each called in the order in which it was registered.

    =========  ====================================================================================
    download   in every attempt, first, on rank 0: fetches data, unless it is there already
    build      in every attempt: makes the objects, names those to be saved, sets the loader
    init       once per run, after ``build``: pretrained weights, a first evaluation. If it
               is cut short, nothing of it remains, and the next attempt runs it from its beginning
    epoch      again and again, until a stop signal is true after an epoch
    exit       after the last epoch. If it is cut short, the next attempt runs it from its
               beginning; once done, it never runs again
    =========  ====================================================================================

    A function takes the job, or nothing. A job is registered in and run by one thread; it can be
    pickled as long as it does not run, with the functions that the pickler can.

    Functions that are to run in another process use the job that they are given: one that their
    module holds as a global may be another object there.
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
    ) -> None:
        """The groups: made elsewhere, else empty ones. ``name`` may be the ``init_group``, which is
        Caffe2's first argument. ``nodes_to_checkpoint``: for :meth:`nodes_to_checkpoint`."""
        if isinstance(name, TaskGroup):
            init_group = name
        self.name = name if isinstance(name, str) else "job"
        given = {Group.INIT: init_group, Group.EPOCH: epoch_group, Group.EXIT: exit_group}
        self._groups = {group: given.get(group) or TaskGroup(group.value) for group in Group}
        for tasks in self._groups.values():
            tasks.job = self
        self._nodes = None if nodes_to_checkpoint is None else tuple(nodes_to_checkpoint)
        self._is_compiled = False
        self._signals: list[Task] = []
        self._saved: dict[str, Any] = {}
        self._loader: Any = None
        self._run: JobRun | None = None
        self._sealed = False
        for signal in stop_signals or ():
            self.add_stop_signal(signal)

    # --- registering
    # --------------------------------------------------------------------------------------------

    @classmethod
    def current(cls) -> Job:
        """The job of the innermost ``with`` of this thread; while one runs, that one.

        Raises:
            UsageError: there is none.
        """
        job = innermost_job()
        if job is None:
            raise UsageError("there is no current job here; use this inside `with Job() as job:`")
        return job

    def __enter__(self) -> Job:
        """Inside it this is the current job, and tasks belong to its epoch group."""
        _stack().append(self)
        self.epoch_group.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.epoch_group.__exit__()
        _stack().pop()

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Inside it this is the current job; tasks made there belong to none of its groups."""
        _stack().append(self)
        try:
            yield
        finally:
            _stack().pop()

    def save(self, name: str, thing: Any) -> Any:
        """Have an object saved under this name; returns it. In ``build``, or before the job runs.

        Raises:
            UsageError: too late, the name is taken, or it lacks ``state_dict`` or
                ``load_state_dict``.
        """
        self.check_open(f"save({name!r})")
        if name in self._saved:
            raise UsageError(f"{name!r} is registered already; give the second object its own name")
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise UsageError(
                f"{name!r} is a {type(thing).__name__} without state_dict() and load_state_dict(); "
                "only objects that have both can be saved. Wrap it in one that has"
            )
        self._saved[name] = thing
        return thing

    @property
    def loader(self) -> Any:
        """What ``job.run.epoch_batches()`` iterates over, or None; set it in ``build``, or before
        the job runs."""
        return self._loader

    @loader.setter
    def loader(self, loader: Any) -> None:
        self.check_open("setting the loader")
        self._loader = loader

    def download(self, function: Function) -> Function:
        """Add a function that fetches data; a decorator, as the four others."""
        return self._add(Group.DOWNLOAD, function)

    def build(self, function: Function) -> Function:
        """Add a function that makes objects."""
        return self._add(Group.BUILD, function)

    def init(self, function: Function) -> Function:
        """Add a function that runs once per run."""
        return self._add(Group.INIT, function)

    def epoch(self, function: Function) -> Function:
        """Add a function that is part of each epoch.

        It iterates its data with ``job.run.epoch_batches()``, at most once. If a stop cuts it off,
        the next attempt calls it again, and its loop gets the remaining batches; whatever it does
        before the loop is repeated. It must set what is part of no state itself, such as
        ``model.train()`` after an evaluation.
        """
        return self._add(Group.EPOCH, function)

    def exit(self, function: Function) -> Function:
        """Add a function for after the last epoch."""
        return self._add(Group.EXIT, function)

    def add_stop_signal(self, signal: Signal) -> Signal:
        """Add a function that says after each epoch whether that was the last one; or the
        output of a task, a flag or a tensor of one element, which is looked at then.

        ``job.run.epoch`` is then the number of epochs that are done. All are asked each time; one
        yes is enough. It should look only at what is saved, or it may answer
        differently after a restart: an output is saved with the job, a flag or a tensor is not.
        """
        self.check_open(f"add_stop_signal({name_of(signal)})")
        if not any(added.function is signal for added in self._signals):
            asked = signal if callable(signal) else ValueSignal.of(signal)
            self._signals.append(Task(asked, group=TaskGroup("stop signals")))
        return signal

    def compile(self, session: Any) -> Self:
        """Compile every group with a session and fix the nodes; return the job itself,
        which can then be pickled with all its functions, closures included, by plain pickle.

        Args:
            session: a class or an object with ``compile(group)``, which returns a group or another
                callable; without one the groups stay as they are.

        Raises:
            UsageError: the job runs, or what came back cannot be called.
        """
        self.check_open(f"compile({name_of(session)})")
        compile_group = getattr(session, "compile", None)
        for group, tasks in self._groups.items():
            if compile_group is not None and tasks.tasks():
                self._groups[group] = self._as_group(compile_group(tasks), tasks.name)
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

    def _add(self, group: Group, function: Function) -> Function:
        Task(function, group=self._groups[group])
        return function

    # --- looking
    # --------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        """An object that was registered with :meth:`save`."""
        if name not in self._saved:
            has = ", ".join(self._saved) or "nothing yet"
            raise UsageError(f"nothing is registered as {name!r} in {self!r}; it has {has}")
        return self._saved[name]

    def names(self) -> tuple[str, ...]:
        """What is saved, by name. Complete after ``build``."""
        return tuple(self._saved)

    def parts(self, group: Group) -> tuple[Task, ...]:
        """The functions of a group, in order."""
        return self._groups[group].tasks()

    def group(self, group: Group) -> TaskGroup:
        """A group, which is a context for tasks to be made in."""
        return self._groups[group]

    @property
    def init_group(self) -> TaskGroup:
        """What runs once per run."""
        return self._groups[Group.INIT]

    @property
    def epoch_group(self) -> TaskGroup:
        """What an epoch consists of."""
        return self._groups[Group.EPOCH]

    @property
    def exit_group(self) -> TaskGroup:
        """What comes after the last epoch."""
        return self._groups[Group.EXIT]

    def nodes_to_checkpoint(self) -> tuple[str, ...]:
        """Those that were given, else the nodes of the tasks of the init group. Names for a
        manager's ``init``: every rank saves its part, whatever the list says."""
        return self.init_group.used_nodes() if self._nodes is None else self._nodes

    def signal_outputs(self) -> dict[str, TaskOutput]:
        """Place in the epoch group -> the output there that is a stop signal."""
        asked = [signal.function for signal in self._signals]
        return {
            str(number): task.outputs()[0]
            for number, task in enumerate(self.parts(Group.EPOCH))
            if any(task.has_output(one) for one in asked)
        }

    def ask_stop_signals(self) -> bool:
        """Whether the epoch that is done was the last one."""
        answers = [bool(signal(self)) for signal in self._signals]
        return any(answers)

    @property
    def is_running(self) -> bool:
        """Whether a JobRunner runs it now."""
        return self._run is not None

    @property
    def run(self) -> JobRun:
        """The Run of this attempt: steps, the batches of the epoch, safe points.

        Raises:
            UsageError: the job does not run.
        """
        if self._run is None:
            raise UsageError(f"{self!r} does not run; JobRunner(job).run() runs it")
        return self._run

    def __repr__(self) -> str:
        return f"Job({self.name!r})"

    # --- for the runner
    # --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that it can run.

        Raises:
            UsageError: it runs already, has no epoch, or would never end.
        """
        if self._run is not None:
            raise UsageError(f"{self!r} runs already")
        if not self.parts(Group.EPOCH):
            raise UsageError(
                f"{self!r} has no function in its epoch group; add one with @job.epoch"
            )
        if not self._signals:
            raise UsageError(
                f"{self!r} has no stop signal and would never end; "
                "job.add_stop_signal(hydroslurm.epoch_limiter(10)) ends it after ten epochs"
            )

    @contextmanager
    def running(self, run: JobRun) -> Iterator[None]:
        """Within it the job has this Run and is the current one; what ``build`` made is forgotten
        after it."""
        saved, loader = dict(self._saved), self._loader
        self._run = run
        try:
            with self.as_current():
                yield
        finally:
            self._run, self._saved, self._loader = None, saved, loader
            self._sealed = False

    def seal(self) -> None:
        """``build`` is over: nothing can be registered any more."""
        self._sealed = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A compiled job travels as one piece, by cloudpickle, which takes closures, too: within it
        the job and its functions refer to each other."""
        if not self._is_compiled or getattr(_local, "is_packing", False):
            return super().__reduce_ex__(protocol)
        _local.is_packing = True
        try:
            return cloudpickle.loads, (cloudpickle.dumps(self),)
        finally:
            _local.is_packing = False

    def __getstate__(self) -> dict[str, Any]:
        if self._run is not None:
            raise UsageError(
                f"{self!r} runs, and a running job cannot be pickled: pickle it before it runs. "
                "Its state is in its checkpoints"
            )
        return dict(vars(self))

    def check_open(self, what: str) -> None:
        """Check that something can still be added.

        Raises:
            UsageError: the objects are built and loaded.
        """
        if self._sealed:
            raise UsageError(
                f"{what} comes too late: the objects of {self!r} have been built and its state is "
                "loaded. Do it in a function of the build group, or before the job runs"
            )


_local = threading.local()


def innermost_job() -> Job | None:
    """The job of the innermost ``with`` of this thread; while one runs, that one."""
    return _stack()[-1] if _stack() else None


def _stack() -> list[Job]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    stack: list[Job] = _local.stack
    return stack

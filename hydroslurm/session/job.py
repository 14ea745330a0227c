"""``Job``: a training written down as groups of functions, for a JobRunner to carry out.

    with hydroslurm.Job("digits") as job:

        @job.build
        def objects(job):                       # in every life
            model = make_model()
            job.save("model", model)
            job.save("optimizer", torch.optim.AdamW(model.parameters()))
            job.loader = make_loader()

        @job.epoch
        def train(job):                         # until a stop signal says that it is enough
            for images, labels in job.run.epoch_batches():
                ...

        job.add_stop_signal(hydroslurm.epoch_limiter(10))

After Caffe2's class of the same name, with one group more. There the state is blobs, which come out
of the checkpoint by themselves, so that ``init`` can make them and be skipped on a resume. Here an
object has to exist before its state can be loaded into it: ``build`` makes the objects, always, and
``init`` is what has to be done only once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from hydroslurm.errors import UsageError
from hydroslurm.session.parts import Group, Part, name_of

if TYPE_CHECKING:
    from hydroslurm.session.jobrun import JobRun

Function = TypeVar("Function", bound=Callable[..., Any])


class Job:
    """Groups of functions, each called in the order in which it was registered.

    =========  ====================================================================================
    download   in every life, first, on rank 0: fetches data. Finds by itself what is there already
    build      in every life: makes the objects, names those to be saved, sets the loader
    init       once per run, after ``build``: pretrained weights, a first evaluation. A life that
               is cut within it leaves nothing behind, and the next one runs it from its beginning
    epoch      again and again, until a stop signal is true after an epoch
    exit       after the last epoch. Cut, it runs again from its beginning in the next life; done,
               never again
    =========  ====================================================================================

    A function takes the job, or nothing. A job is registered in and run by one thread; it can be
    pickled as long as it does not run, with the functions that the pickler can.

    Functions that are to run in another process use the job that they are given: one that their
    module holds as a global may be another object there.
    """

    def __init__(self, name: str = "job") -> None:
        self.name = name
        self._parts: dict[Group, list[Part]] = {group: [] for group in Group}
        self._signals: list[Part] = []
        self._saved: dict[str, Any] = {}
        self._loader: Any = None
        self._run: JobRun | None = None
        self._sealed = False

    # --- registering
    # --------------------------------------------------------------------------------------------

    @classmethod
    def current(cls) -> Job:
        """The job of the innermost ``with`` of this thread; while one runs, that one.

        Raises:
            UsageError: there is none.
        """
        stack = _stack()
        if not stack:
            raise UsageError("there is no current job here; use this inside `with Job() as job:`")
        return stack[-1]

    def __enter__(self) -> Job:
        _stack().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _stack().pop()

    def download(self, function: Function) -> Function:
        """Add a function that fetches data; a decorator, as the four others."""
        return self._add(Group.DOWNLOAD, function)

    def build(self, function: Function) -> Function:
        """Add a function that makes objects."""
        return self._add(Group.BUILD, function)

    def init(self, function: Function) -> Function:
        """Add a function that is done once in a run."""
        return self._add(Group.INIT, function)

    def epoch(self, function: Function) -> Function:
        """Add a function that is a part of each epoch.

        It goes over its data with ``job.run.epoch_batches()``, at most once. Stopped within, it is
        called again in the next life, and its loop gets the batches that are left; whatever it does
        before the loop is done again. It sets itself what is no part of any state, such as
        ``model.train()`` after an evaluation.
        """
        return self._add(Group.EPOCH, function)

    def exit(self, function: Function) -> Function:
        """Add a function for after the last epoch."""
        return self._add(Group.EXIT, function)

    def add_stop_signal(self, signal: Function) -> Function:
        """Add a function that is asked after each epoch whether that was the last one.

        ``job.run.epoch`` is then the number of epochs that are done. All are asked each time, and
        one that says yes is enough. It should look at what is saved only, or else it may answer
        differently after a restart.
        """
        self._check_open(f"add_stop_signal({name_of(signal)})")
        self._signals.append(Part.of(signal))
        return signal

    def save(self, name: str, thing: Any) -> Any:
        """Have an object saved under this name; returns it. In ``build``, or before the job runs.

        Raises:
            UsageError: too late, the name is taken, or it lacks ``state_dict`` or
                ``load_state_dict``.
        """
        self._check_open(f"save({name!r})")
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
        """What ``job.run.epoch_batches()`` goes over; set it in ``build``, or before the job runs.
        None when there is none."""
        return self._loader

    @loader.setter
    def loader(self, loader: Any) -> None:
        self._check_open("setting the loader")
        self._loader = loader

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

    def parts(self, group: Group) -> tuple[Part, ...]:
        """The functions of a group, in order."""
        return tuple(self._parts[group])

    @property
    def run(self) -> JobRun:
        """The Run of this life: steps, the batches of the epoch, safe points.

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
        """See that it can be run.

        Raises:
            UsageError: it runs already, has no epoch, or would never end.
        """
        if self._run is not None:
            raise UsageError(f"{self!r} runs already")
        if not self._parts[Group.EPOCH]:
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
            with self:
                yield
        finally:
            self._run, self._saved, self._loader = None, saved, loader
            self._sealed = False

    def seal(self) -> None:
        """``build`` is over: nothing can be registered any more."""
        self._sealed = True

    def ask_stop_signals(self) -> bool:
        """Whether the epoch that is done was the last one."""
        answers = [bool(signal(self)) for signal in self._signals]
        return any(answers)

    def __getstate__(self) -> dict[str, Any]:
        if self._run is not None:
            raise UsageError(
                f"{self!r} runs, and a running job cannot be pickled: pickle it before it runs. "
                "Its state is in its checkpoints"
            )
        return dict(vars(self))

    def _add(self, group: Group, function: Function) -> Function:
        self._check_open(f"{group.value}({name_of(function)})")
        self._parts[group].append(Part.of(function))
        return function

    def _check_open(self, what: str) -> None:
        if self._sealed:
            raise UsageError(
                f"{what} comes too late: the objects of {self!r} have been built and its state is "
                "loaded. Do it in a function of the build group, or before the job runs"
            )


_local = threading.local()


def _stack() -> list[Job]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    stack: list[Job] = _local.stack
    return stack

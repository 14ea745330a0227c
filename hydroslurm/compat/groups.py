"""The groups and the stop signals of a job: how they are filled, compiled and asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hydroslurm.compat.parts import Group, ValueSignal
from hydroslurm.compat.tasks import Task, TaskGroup, TaskOutput, name_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from hydroslurm.compat.job import Job

Function = TypeVar("Function", bound=Callable[..., Any])
Signal = TypeVar("Signal")


class Groups:
    """What a :class:`Job` does, without what it does it to; a Job says until when it is open."""

    def __init__(
        self,
        init_group: TaskGroup | None,
        epoch_group: TaskGroup | None,
        exit_group: TaskGroup | None,
        nodes_to_checkpoint: Iterable[str] | None,
    ) -> None:
        given = {Group.INIT: init_group, Group.EPOCH: epoch_group, Group.EXIT: exit_group}
        self._groups = {group: given.get(group) or TaskGroup(group.value) for group in Group}
        self._nodes = None if nodes_to_checkpoint is None else tuple(nodes_to_checkpoint)
        self._is_compiled = False
        self._signals: list[Task] = []

    def check_open(self, what: str) -> None:
        """See that something can still be added.

        Raises:
            UsageError: it is too late.
        """
        raise NotImplementedError

    # --- filling
    # --------------------------------------------------------------------------------------------

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

    def add_stop_signal(self, signal: Signal) -> Signal:
        """Add a function that is asked after each epoch whether that was the last one; or the
        output of a task, a flag or a tensor of one element, which is looked at then.

        ``job.run.epoch`` is then the number of epochs that are done. All are asked each time, and
        one that says yes is enough. It should look at what is saved only, or else it may answer
        differently after a restart: an output is saved with the job, a flag or a tensor is not.
        """
        self.check_open(f"add_stop_signal({name_of(signal)})")
        if not any(added.function is signal for added in self._signals):
            asked = signal if callable(signal) else ValueSignal.of(signal)
            self._signals.append(Task(asked, group=TaskGroup("stop signals")))
        return signal

    def compile(self, session: Any) -> Self:
        """Have every group compiled by a session, and the nodes settled; returns the job itself,
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
        group.job = cast("Job", self)
        return group

    # --- looking
    # --------------------------------------------------------------------------------------------

    def parts(self, group: Group) -> tuple[Task, ...]:
        """The functions of a group, in order."""
        return self._groups[group].tasks()

    def group(self, group: Group) -> TaskGroup:
        """A group, which is a context for tasks to be made in."""
        return self._groups[group]

    @property
    def init_group(self) -> TaskGroup:
        """What is done once in a run."""
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
        answers = [bool(signal(cast("Job", self))) for signal in self._signals]
        return any(answers)

    def _take(self, stop_signals: Iterable[Any]) -> None:
        for group in self._groups.values():
            group.job = cast("Job", self)
        for signal in stop_signals:
            self.add_stop_signal(signal)

    def _add(self, group: Group, function: Function) -> Function:
        Task(function, group=self._groups[group])
        return function

"""Horovod's form of elastic training.

    state = hydroslurm.elastic.State(model=model, optimizer=optimizer, loader=loader)

    @hydroslurm.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 10):
            for inputs, targets in state.loader:
                ...
                state.commit()

    train(state)

``commit`` copies the state in memory and lets members change; ``check_host_updates`` does not copy.
After each change the function is called again and goes on from the state: the current one, if the
change was announced. After a death the work since the last commit is repeated, so commit as often
as copies are cheap. State in memory is gone when the last member goes. In contrast,
:class:`hydroslurm.Run` with ``elastic=True`` saves, loses no step, and keeps the position in the
data. Each member may shard its model over its ranks (:mod:`hydroslurm.elastic.sharded`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from hydroslurm.checkpoint.tree import encode
from hydroslurm.core.exitcodes import ExitForRequeue
from hydroslurm.data.position import position_of
from hydroslurm.data.sampler import ResumableSampler
from hydroslurm.elastic.engine import InPlaceEngine
from hydroslurm.elastic.group import meeting
from hydroslurm.elastic.reduction import Accumulation
from hydroslurm.elastic.roster import Depart, Form
from hydroslurm.elastic.transfer import hand_over
from hydroslurm.errors import UnsavableState, UsageError
from hydroslurm.gate.handlers import kernel_kept
from hydroslurm.runtime.children import workers_shielded

P = ParamSpec("P")
R = TypeVar("R")
NEWS_S = 3.0
"""How long to wait, after a collective failed, for the message that a rank is gone."""
TOGETHER_S = 15.0
"""How long a rank whose collective failed waits for the other ranks of a member that shards its
model. They may wait for it in a step that it has left; then only its exit releases them."""


class Resized(Exception):
    """The members have changed; :func:`run` catches it and calls the function again."""


class Dropped(RuntimeError):
    """A rank is gone, so this step's gradients are invalid; :func:`run` catches it."""


class State:
    """State of a training: objects, and plain values as attributes.

    Args:
        objects: by name. Those with ``state_dict`` and ``load_state_dict`` are saved and loaded
            with these; all others must be plain values (numbers, text, lists, dicts, tensors).
            Each becomes an attribute. Iterating a DataLoader gives what is left of the epoch in
            the attribute ``epoch`` (0 by default); after a change each rank goes on with its new
            share. Its sampler is a :class:`hydroslurm.data.ResumableSampler`, which may also
            be given instead of the loader (without workers, which take samples ahead).

    Raises:
        UsageError: this process has no elastic run, or one with ``summation: fixed_order`` or
            ``averaging``; the model is sharded over other ranks than those of this member; a
            name is taken; a value is none of these; a DataLoader has another sampler.
    """

    def __init__(self, **objects: Any) -> None:
        if taken := sorted(name for name in objects if hasattr(type(self), name)):
            raise UsageError(f"State({taken[0]}=...): the name is taken by a method of the state")
        self._has_optimizer = any(isinstance(value, Optimizer) for value in objects.values())
        for name, item in objects.items():
            if isinstance(item, DataLoader):
                loader = StateLoader(item, epoch=self._epoch_now, has_optimizer=self._has_optimizer)
                objects = {"epoch": 0, **objects, name: loader}
        self._objects = {
            name: value for name, value in objects.items() if hasattr(value, "load_state_dict")
        }
        self._names = [name for name in objects if name not in self._objects]
        for name, value in objects.items():
            if name in self._names:
                _require_plain(name, value)
            setattr(self, name, value)
        self._engine = InPlaceEngine(
            os.environ,
            things=self._objects.values(),
            warn=lambda text: warnings.warn(text, stacklevel=2),
            stop=lambda: self._stop.is_set(),
            meet=self._meet,
            resume=self._resume,
            save=self._cannot_save,
            leave=self._depart,
        )
        options = self._engine.folder.options()
        if options.summation == "fixed_order" or options.averaging_every:
            asked = "summation: fixed_order" if options.summation == "fixed_order" else "averaging"
            raise UsageError(
                f"an elastic State does not know the steps of its script, so that it has no "
                f"`{asked}`: use hydroslurm.Run(elastic=True), or leave that out of the spec"
            )
        self._point = 0
        """How many commits and checks all ranks have reached: their count of steps; then that
        of the last copy."""
        self._kept_point = 0
        self._kept: Mapping[str, Any] = {}
        self._accumulation = Accumulation()
        self._used: dict[str, dict[str, Any]] = {}
        """Positions of the samplers when an optimizer last stepped."""
        self._on_reset: list[Callable[[], None]] = []
        self._stop = threading.Event()

    def commit(self) -> None:
        """Copy the current state, and let members change here.

        Raises:
            Resized: they changed; :func:`run` handles it.
        """
        self._reach_point(keeps=True)

    def check_host_updates(self) -> None:
        """Let members change here, without a copy; all ranks call it equally often.

        Raises:
            Resized: they changed.
        """
        self._reach_point(keeps=False)

    def save(self) -> None:
        """Copy the state in this process, as :meth:`commit` does; all ranks call it."""
        self._engine.agree()
        if not self._engine.failed:  # a failed step leaves half a state
            self._keep()

    def restore(self) -> None:
        """Return to the last copy."""
        if self._kept:
            self._apply(copy.deepcopy(self._kept))
            self._point = self._kept_point

    def sync(self) -> None:
        """Do nothing; for Horovod's scripts. Newcomers get the state when they join."""

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Call these after each change of members, in all processes once each has the state: to set
        a learning rate by ``dist.get_world_size()``, or to rebuild a sampler. A process that joins
        calls them, too: until then it was alone with its node."""
        self._on_reset += callbacks

    # --- inside
    # --------------------------------------------------------------------------------------------

    def _reach_point(self, *, keeps: bool) -> None:
        """Reach a commit or check. Gradients being accumulated are not part of the state: wait
        until an optimizer has used them; if a rank is gone, go back to the last copy."""
        broken = self._engine.agree()
        if self._has_optimizer and self._accumulation.is_under_way(self._weights()):
            if not broken:
                return
            self._engine.failed = True
        if not self._engine.failed:
            self._point += 1
            if keeps:
                self._keep()
        self._let_change(broken)

    def _let_change(self, broken: bool) -> None:
        if self._stop.is_set():
            self._engine.member.leave("SIGTERM received")
        failed = self._engine.failed
        self._engine.sum.is_sending = False
        if failed:
            self.restore()
        holds_if_broken = broken or self._engine.shards is None
        if self._engine.safe_point(self._point, failed=failed, holds_if_broken=holds_if_broken):
            raise Resized

    def _epoch_now(self) -> int:
        return int(vars(self)["epoch"])

    def _keep(self) -> None:
        self._kept, self._kept_point = copy.deepcopy(self._now()), self._point

    def _before_optimizer(self, *_: Any) -> None:
        """Drop an invalid step here, however far the next commit is. Not if the member shards its
        model: another of its ranks may not know yet, and wait for this one in the next step. They
        find out together, at a commit or check."""
        if self._engine.failed and self._engine.shards is None:
            raise Dropped("a rank is gone; the step is dropped")

    def _after_optimizer(self, *_: Any) -> None:
        """Mark all batches fetched so far as used."""
        self._accumulation.used(self._weights())
        for name, item in self._objects.items():
            if isinstance(item, ResumableSampler):
                self._used[name] = item.state_dict()
            elif isinstance(item, StateLoader):
                item.note_used()

    def _weights(self) -> list[nn.Parameter]:
        modules = [item for item in self._objects.values() if isinstance(item, nn.Module)]
        return [p for module in modules for p in module.parameters() if p.requires_grad]

    def _state_of(self, name: str) -> Any:
        """Return an object's state; a fetched batch without an optimizer step comes again."""
        item = self._objects[name]
        now = item.state_dict()
        if not isinstance(item, ResumableSampler) or not (self._used or self._has_optimizer):
            return now
        used = self._used.get(name)
        if used and used["epoch"] == now["epoch"] and used["consumed"] <= now["consumed"]:
            return used
        return item.begin_state()

    def _now(self) -> dict[str, Any]:
        return {
            "objects": {name: self._state_of(name) for name in self._objects},
            "values": {name: getattr(self, name) for name in self._names},
        }

    def _apply(self, state: Mapping[str, Any]) -> None:
        for name, item in self._objects.items():
            item.load_state_dict(state["objects"][name])
            if isinstance(item, nn.Module):
                item.zero_grad(set_to_none=True)
        self._used = {name: state["objects"][name] for name in self._used}
        for name in self._names:
            setattr(self, name, state["values"][name])

    @contextlib.contextmanager
    def _stopping_at_sigterm(self) -> Iterator[None]:
        """Leave at SIGTERM; call the script's own handler, too, and restore it afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread can install handlers
            return

        def stop(signo: int, frame: FrameType | None) -> None:
            self._stop.set()  # first: the script's handler may raise
            if callable(before):
                before(signo, frame)

        with contextlib.ExitStack() as undo:
            undo.enter_context(kernel_kept(signal.SIGTERM))  # Python does not know faulthandler's
            before = signal.signal(signal.SIGTERM, stop)
            is_leaving = False
            try:
                yield
            except ExitForRequeue:  # a second SIGTERM would replace its status
                is_leaving = True
                raise
            finally:
                if is_leaving or signal.getsignal(signal.SIGTERM) is not stop:
                    undo.pop_all()
                else:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)

    def _begin(self) -> None:
        self._engine.begin()
        if self._engine.is_done:
            self._engine.close()
            warnings.warn("this run has finished; nothing to do", stacklevel=2)
            raise ExitForRequeue.finished()

    def _cannot_save(self) -> None:
        warnings.warn(
            "too few members are left, and an elastic State is in memory only: what was "
            "trained is lost if no member stays. hydroslurm.Run(elastic=True) saves",
            stacklevel=2,
        )

    def _meet(self, form: Form) -> int:
        self._engine.group.form(form)
        with meeting():
            got = self._hand_over(form)
        if got is not None:
            self._apply(got)
            self._point = int(got["point"])
        self._engine.prepare(form)
        return self._point

    def _resume(self, _: Form) -> None:
        self._keep()
        self._share_samples()
        for weight in self._weights():
            weight.grad = None  # the function starts over, and may clear them after its steps
        for callback in self._on_reset:
            callback()

    def _hand_over(self, form: Form) -> Any:
        def own_state() -> dict[str, Any]:
            return {**self._now(), "point": self._point}

        if self._engine.shards is not None:
            return self._engine.shards.hand_over(own_state, form)
        state = own_state() if form.rank == form.source else None
        return hand_over(state, source=form.source, needs=form.needs, rank=form.rank)

    def _share_samples(self) -> None:
        """Reload the samplers' state so that they start at the right sample; models and optimizers
        already have theirs."""
        for name, item in self._objects.items():
            if not isinstance(item, (nn.Module, Optimizer)):
                item.load_state_dict(copy.deepcopy(self._kept["objects"][name]))

    def _depart(self, depart: Depart) -> NoReturn:
        self._engine.close()
        if depart.failed or depart.again:
            warnings.warn(f"this member ends: {depart.reason}", stacklevel=2)
        raise ExitForRequeue(depart.exit_status(stops=self._stop.is_set()))

    def _recover(self, error: RuntimeError) -> None:
        """Go on after an error in the function if a member was lost; otherwise raise it again."""
        engine = self._engine
        waited = threading.Event()
        for _ in range(int(NEWS_S / 0.1)):
            if engine.failed or engine.member.broken or engine.member.is_dismissed:
                break
            if isinstance(error, dist.DistError):
                engine.member.fail()
                break
            waited.wait(0.1)
        else:
            raise error
        engine.failed = True
        try:
            engine.agree(limit_s=TOGETHER_S)
        except RuntimeError as gone:
            self._depart(
                Depart(f"this member's ranks are not together any more: {gone}", again=True)
            )
        self.restore()
        engine.safe_point(self._point, failed=True)


class StateLoader:
    """A DataLoader of a :class:`State`: gives each rank its share of the rest of an epoch. A batch
    counts as used once an optimizer has stepped after it, so a commit may precede its training.

    Args:
        loader: has a :class:`~hydroslurm.data.ResumableSampler`; workers are optional.
        epoch: returns the epoch to iterate.
        has_optimizer: whether an optimizer of the state steps. If not, a fetched batch counts as
            used until one does.

    Raises:
        UsageError: the sampler's order cannot be shared by other members.
    """

    def __init__(
        self, loader: DataLoader[Any], *, epoch: Callable[[], int], has_optimizer: bool
    ) -> None:
        self._loader = loader
        self._epoch = epoch
        self._position = position_of(loader)
        if self._position.name != "sampler":
            raise UsageError(
                "an elastic State was given a DataLoader whose sampler is a "
                f"{type(loader.sampler).__name__}: no other number of ranks could go on within its "
                "epochs. Give it sampler=hydroslurm.data.ResumableSampler(dataset), in the place "
                "of shuffle= or a DistributedSampler"
            )
        self._loaded: Mapping[str, Any] | None = None
        self._used: Mapping[str, Any] | None = None
        self._counts_used = has_optimizer
        self._ended: int | None = None

    def __len__(self) -> int:
        """Return the number of this rank's batches in a whole epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        epoch = self._epoch()
        if epoch == self._ended:
            raise UsageError(
                f"epoch {epoch} is over, and state.epoch says {epoch} still: go by it, as in "
                "`for state.epoch in range(state.epoch, epochs):`"
            )
        state, self._loaded = self._loaded, None
        with workers_shielded((signal.SIGTERM,)):
            if state is not None and state["epoch"] == epoch:
                batches = self._position.resume_epoch(state)
            else:
                batches = self._position.begin_epoch(epoch)
            self._used = self._position.state_dict()
            yield from batches
        self._ended, self._used = epoch, self._position.state_dict()

    def note_used(self) -> None:
        """Mark the fetched batches as used: an optimizer has stepped."""
        self._counts_used = True
        if self._used is not None:
            self._used = self._position.state_dict()

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position after the last used batch."""
        if self._loaded is not None:
            return self._loaded
        if self._counts_used and self._used is not None:
            return self._used
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next iterator there, if it is for the same epoch."""
        self._loaded, self._used, self._ended = state, None, None


def run(train: Callable[Concatenate[State, P], R]) -> Callable[Concatenate[State, P], R | None]:
    """Make a function train elastically: call it again after each change of members.

    Returns what the function returns. Torch's default group is then that of all who have trained. A
    process that joins after the end of the run exits at once, with status 0.
    """

    @functools.wraps(train)
    def elastic(state: State, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        result: R | None = None
        with state._stopping_at_sigterm():
            state._begin()
            hooks = [
                register_optimizer_step_pre_hook(state._before_optimizer),
                register_optimizer_step_post_hook(state._after_optimizer),
            ]
            try:
                while not state._engine.is_done:
                    try:
                        result = train(state, *args, **kwargs)
                        state._engine.safe_point(state._point, final=True)
                    except Resized:
                        continue
                    except RuntimeError as error:
                        state._recover(error)
            finally:
                for hook in hooks:
                    hook.remove()
                if not state._engine.is_done:
                    state._engine.close()
        state._engine.remain()
        return result

    return elastic


def _require_plain(name: str, value: Any) -> None:
    try:
        encode({name: value}, prefix="state")
    except UnsavableState as error:
        raise UsageError(
            f"State({name}=...): a {type(value).__name__} has no state_dict and load_state_dict, "
            f"and is no plain value that another member could get ({error})"
        ) from error

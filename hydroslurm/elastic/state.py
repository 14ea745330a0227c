"""Horovod's shape of an elastic training, for those who know it.

    state = hydroslurm.elastic.State(model=model, optimizer=optimizer, loader=loader)

    @hydroslurm.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 10):
            for inputs, targets in state.loader:
                ...
                state.commit()

    train(state)

``commit`` keeps a copy of the state in memory and is where the members may change, and so is
``check_host_updates``, without a copy. The function is called again after each change, and goes on
from what the state says: from what it is now, if the change was announced. After a death the work
since the last commit is lost and done again: commit as often as a copy costs little. What is in
memory only is gone when the last member goes: :class:`hydroslurm.Run` with ``elastic=True`` saves,
loses no step, and keeps the position in the data. The model may be one that each member shards over
its ranks (:mod:`hydroslurm.elastic.sharded`).
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
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from hydroslurm.checkpoint.tree import encode
from hydroslurm.core.exitcodes import FAILED, RUN_AGAIN, ExitForRequeue
from hydroslurm.data.position import position_of
from hydroslurm.data.sampler import ResumableSampler
from hydroslurm.elastic.accumulation import Accumulation
from hydroslurm.elastic.engine import InPlaceEngine
from hydroslurm.elastic.group import meeting
from hydroslurm.elastic.roster import Depart, Directive, Finished, Form, Save
from hydroslurm.elastic.transfer import hand_over
from hydroslurm.errors import RanksError, UnsavableState, UsageError
from hydroslurm.gate.handlers import kernel_kept
from hydroslurm.runtime.child_signals import workers_shielded

P = ParamSpec("P")
R = TypeVar("R")
NEWS_S = 3.0
"""How long after an error of a collective the word is waited for that a rank is gone."""
TOGETHER_S = 15.0
"""How long a rank whose collective has failed waits for the others of a member that shards its
model: if they are in a step, which it has left, they wait for it, and only its end helps them."""


class Resized(Exception):
    """The members have changed; :func:`run` catches it and calls the function again."""


class Dropped(RuntimeError):
    """A rank is gone, and the gradients of this step are nothing; :func:`run` catches it."""


class State:
    """What a training is, apart from its code: objects, and plain values as attributes.

    Args:
        objects: by name: those with ``state_dict`` and ``load_state_dict`` are saved and loaded
            with these; all others have to be plain values (numbers, text, lists, dicts, tensors).
            Each is an attribute of the state. A DataLoader becomes one to iterate, with what is
            left of the epoch that the attribute ``epoch`` names, which is 0 if it is not given;
            behind a change each rank goes on with its new share. Its sampler is a
            :class:`hydroslurm.data.ResumableSampler`. That may be given in its place (without
            workers, which take samples ahead).

    Raises:
        UsageError: this process belongs to no elastic run, or to one with ``summation:
            fixed_order`` or ``averaging``; the model is sharded otherwise than over the ranks of
            this member; a name that is taken; a value that is none of these; a DataLoader with
            another sampler.
    """

    def __init__(self, **objects: Any) -> None:
        if taken := sorted(name for name in objects if hasattr(type(self), name)):
            raise UsageError(f"State({taken[0]}=...): the name is taken by a method of the state")
        self._has_optimizer = any(isinstance(one, Optimizer) for one in objects.values())
        for name, one in objects.items():
            if isinstance(one, DataLoader):
                loader = StateLoader(one, epoch=self._epoch_now, has_optimizer=self._has_optimizer)
                objects = {"epoch": 0, **objects, name: loader}
        self._objects = {
            name: one for name, one in objects.items() if hasattr(one, "load_state_dict")
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
        )
        told = self._engine.folder.options()
        if told.summation == "fixed_order" or told.averaging_every:
            asked = "summation: fixed_order" if told.summation == "fixed_order" else "averaging"
            raise UsageError(
                f"an elastic State does not know the steps of its script, so that it has no "
                f"`{asked}`: use hydroslurm.Run(elastic=True), or leave that out of the spec"
            )
        self._point = 0
        """How often all ranks have come to a commit or a check, which is what they count steps by;
        and as of the last copy."""
        self._kept_point = 0
        self._is_done = False
        self._kept: Mapping[str, Any] = {}
        self._accumulation = Accumulation()
        self._used: dict[str, dict[str, Any]] = {}
        """Of samplers: where they were when an optimizer stepped last."""
        self._on_reset: list[Callable[[], None]] = []
        self._stop = threading.Event()

    def commit(self) -> None:
        """Keep the state as it is now, and let members come and go here.

        Raises:
            Resized: they did; :func:`run` handles it.
        """
        self._reach_point(keeps=True)

    def check_host_updates(self) -> None:
        """Let members come and go here, without a copy; all ranks call it equally often.

        Raises:
            Resized: they did.
        """
        self._reach_point(keeps=False)

    def save(self) -> None:
        """Keep a copy of the state in this process, as :meth:`commit` does; all ranks call it."""
        self._engine.agree()
        if not self._engine.failed:  # else it is half of a step
            self._keep()

    def restore(self) -> None:
        """Go back to the last copy."""
        if self._kept:
            self._apply(copy.deepcopy(self._kept))
            self._point = self._kept_point

    def sync(self) -> None:
        """For Horovod's scripts; members that come get the state when they do."""

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Have these called after each change of the members, in all processes, once each has the
        state: to set a learning rate by ``dist.get_world_size()``, or to make a sampler anew. Also
        when a process joins, for before it was alone with its node."""
        self._on_reset += callbacks

    # --- inside
    # --------------------------------------------------------------------------------------------

    def _reach_point(self, *, keeps: bool) -> None:
        """Gradients that are being accumulated are no part of the state: nothing happens until an
        optimizer has used them, and if a rank is gone the last copy is gone back to."""
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
        directive = self._engine.member.safe_point(
            self._point,
            failed=failed,
            holds_if_broken=broken or self._engine.shards is None,
            stop=self._stop.is_set,
        )
        if directive is not None:
            self._obey(directive)
            raise Resized

    def _epoch_now(self) -> int:
        return int(vars(self)["epoch"])

    def _keep(self) -> None:
        self._kept, self._kept_point = copy.deepcopy(self._now()), self._point

    def _before_optimizer(self, *_: Any) -> None:
        """A step that does not count ends here, however far the next commit is. Of a member that
        shards its model another rank may not know of it, and wait for this one in the next step:
        they find out together, at a commit or a check."""
        if self._engine.failed and self._engine.shards is None:
            raise Dropped("a rank is gone; the step is dropped")

    def _after_optimizer(self, *_: Any) -> None:
        """What was fetched until now has been used."""
        self._accumulation.used(self._weights())
        for name, one in self._objects.items():
            if isinstance(one, ResumableSampler):
                self._used[name] = one.state_dict()
            elif isinstance(one, StateLoader):
                one.note_used()

    def _weights(self) -> list[nn.Parameter]:
        modules = [one for one in self._objects.values() if isinstance(one, nn.Module)]
        return [one for each in modules for one in each.parameters() if one.requires_grad]

    def _state_of(self, name: str) -> Any:
        """A batch that was fetched and that no optimizer has stepped by yet comes again."""
        one = self._objects[name]
        now = one.state_dict()
        if not isinstance(one, ResumableSampler) or not (self._used or self._has_optimizer):
            return now
        used = self._used.get(name)
        if used and used["epoch"] == now["epoch"] and used["consumed"] <= now["consumed"]:
            return used
        return one.begin_state()

    def _now(self) -> dict[str, Any]:
        return {
            "objects": {name: self._state_of(name) for name in self._objects},
            "values": {name: getattr(self, name) for name in self._names},
        }

    def _apply(self, state: Mapping[str, Any]) -> None:
        for name, one in self._objects.items():
            one.load_state_dict(state["objects"][name])
            if isinstance(one, nn.Module):
                one.zero_grad(set_to_none=True)
        self._used = {name: state["objects"][name] for name in self._used}
        for name in self._names:
            setattr(self, name, state["values"][name])

    @contextlib.contextmanager
    def _stopping_at_sigterm(self) -> Iterator[None]:
        """Leave at SIGTERM; the script's own handler is called too, and restored afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread can take a signal
            return

        def stop(signo: int, frame: FrameType | None) -> None:
            self._stop.set()  # first: the other may raise
            if callable(before):
                before(signo, frame)

        with contextlib.ExitStack() as undo:
            undo.enter_context(kernel_kept(signal.SIGTERM))  # faulthandler's is none of Python's
            before = signal.signal(signal.SIGTERM, stop)
            is_leaving = False
            try:
                yield
            except ExitForRequeue:  # a second SIGTERM would take its status
                is_leaving = True
                raise
            finally:
                if is_leaving or signal.getsignal(signal.SIGTERM) is not stop:
                    undo.pop_all()
                else:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)

    def _begin(self) -> None:
        self._engine.member.start()
        self._obey(self._engine.member.begin(stop=self._stop.is_set))
        if self._is_done:
            self._engine.close()
            warnings.warn("this run has finished; nothing to do", stacklevel=2)
            raise ExitForRequeue.finished()

    def _obey(self, directive: Directive) -> None:
        member = self._engine.member
        while True:
            if isinstance(directive, Form):
                if self._meet(directive):
                    return
            elif isinstance(directive, Finished):
                self._is_done = True
                return
            elif isinstance(directive, Save):
                warnings.warn(
                    "too few members are left, and an elastic State is in memory only: what was "
                    "trained is lost if no member stays. hydroslurm.Run(elastic=True) saves",
                    stacklevel=2,
                )
                member.saved(directive)
            else:
                assert isinstance(directive, Depart)
                self._depart(directive)
            directive = member.again(stop=self._stop.is_set)

    def _meet(self, form: Form) -> bool:
        engine = self._engine
        try:
            engine.group.form(form)
            with meeting():
                got = self._hand_over(form)
            if got is not None:
                self._apply(got)
                self._point = int(got["point"])
            engine.prepare(form)
        except RanksError as error:
            engine.group.destroy()
            engine.member.formed(form, ok=False, error=str(error))
            return False
        engine.member.formed(form, ok=True, step=self._point)
        self._keep()
        self._share_samples()
        for one in self._weights():
            one.grad = None  # the function begins anew, and may clear them behind its steps
        for callback in self._on_reset:
            callback()
        return True

    def _hand_over(self, form: Form) -> Any:
        def mine() -> dict[str, Any]:
            return {**self._now(), "point": self._point}

        if self._engine.shards is not None:
            return self._engine.shards.hand_over(mine, form)
        state = mine() if form.rank == form.source else None
        return hand_over(state, source=form.source, needs=form.needs, rank=form.rank)

    def _share_samples(self) -> None:
        """A sampler begins where its state says only if that is loaded; models and optimizers have
        theirs already."""
        for name, one in self._objects.items():
            if not isinstance(one, (nn.Module, Optimizer)):
                one.load_state_dict(copy.deepcopy(self._kept["objects"][name]))

    def _depart(self, depart: Depart) -> None:
        self._engine.close()
        if depart.failed or depart.again:
            warnings.warn(f"this member ends: {depart.reason}", stacklevel=2)
        if depart.failed:
            raise ExitForRequeue(FAILED)
        raise ExitForRequeue(RUN_AGAIN if depart.again or self._stop.is_set() else 0)

    def _recover(self, error: RuntimeError) -> None:
        """After an error in the function: go on if a member was lost, else raise it again."""
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
        directive = engine.member.safe_point(self._point, failed=True, stop=self._stop.is_set)
        assert directive is not None
        self._obey(directive)

    def _finish(self) -> bool:
        """The function has returned; whether all have come to their end."""
        directive = self._engine.member.safe_point(
            self._point, final=True, failed=False, stop=self._stop.is_set
        )
        assert directive is not None
        self._obey(directive)
        return self._is_done


class StateLoader:
    """A DataLoader of a :class:`State`: gives what is left of an epoch, to each rank its share. A
    batch is used once an optimizer has stepped behind it: it may be committed before it is trained.

    Args:
        loader: with a :class:`~hydroslurm.data.ResumableSampler`, and with workers or without.
        epoch: says which one is to be gone through.
        has_optimizer: whether an optimizer of the state steps; else a batch that was given is used,
            until one has.

    Raises:
        UsageError: another sampler, whose order not all members could take up.
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
        """The batches of this rank in a whole epoch."""
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
        """An optimizer has stepped: the batches that were given are used."""
        self._counts_used = True
        if self._used is not None:
            self._used = self._position.state_dict()

    def state_dict(self) -> Mapping[str, Any]:
        """The place behind the last batch that is used."""
        if self._loaded is not None:
            return self._loaded
        if self._counts_used and self._used is not None:
            return self._used
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iterator begin there, if it is for the same epoch."""
        self._loaded, self._used, self._ended = state, None, None


def run(train: Callable[Concatenate[State, P], R]) -> Callable[Concatenate[State, P], R | None]:
    """Make a function train elastically: it is called again after each change of the members.

    It returns what the function has returned, and torch's default group is that of all who have
    trained. A process that comes after the end of the run ends at once, with status 0.
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
                while not state._is_done:
                    try:
                        result = train(state, *args, **kwargs)
                        state._finish()
                    except Resized:
                        continue
                    except RuntimeError as error:
                        state._recover(error)
            finally:
                for hook in hooks:
                    hook.remove()
                if not state._is_done:
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

"""``Contents``: what a run saves, and gives back.

Shared by all ranks are the states of its objects. Each rank adds its own: where it is in its data,
with the random numbers of that place; what the script has changed outside of any ``state_dict()``;
gradients that are still added up; the order in which DDP sums them; where its trackers are; and
what a framework's adapter puts in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from hydroslurm.checkpoint import rng
from hydroslurm.checkpoint.census import MOVED
from hydroslurm.checkpoint.manifest import Manifest
from hydroslurm.checkpoint.storage import AnyonesStorage
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore, State, newest_good
from hydroslurm.checkpoint.tree import local_of
from hydroslurm.core.fence import Fence
from hydroslurm.errors import CheckpointError, StateMismatch, UsageError
from hydroslurm.training.checks import FirstStep, Remedies, recompiles
from hydroslurm.training.cursor import Cursor
from hydroslurm.training.loggers import Trackers
from hydroslurm.training.objects import (
    Composition,
    Models,
    Objects,
    Stateful,
    modules_in,
    require_registrable,
)
from hydroslurm.training.rank_group import RankGroup
from hydroslurm.training.script import Script, largest

if TYPE_CHECKING:
    from hydroslurm.training.buckets import BucketOrders

_OF_A_RANK = ("rng", "registered", "new_rank", "script")
"""What a rank keeps of its own state when the number of ranks has changed."""


class Contents:
    """Of one rank.

    Args:
        trackers: the runs that are open in them.
        models: those that a framework trains; None: the registered objects, in a loop of the
            script's own.

    Attributes:
        objects, cursor, script, gradients, trackers: the parts.
        bucket_orders: one more, with three ranks or more.
        parts: an adapter's, each rank's own, by name.
        noted: the same, of what its owner looks up in ``pending`` before the first step.
        pending: this rank's own state as it was loaded, until a framework's training begins.
    """

    def __init__(
        self, rank_group: RankGroup, *, trackers: Trackers, models: Models | None = None
    ) -> None:
        self.objects = Objects()
        self.cursor = Cursor()
        self._is_deferred = models is not None
        self._rank_group = rank_group
        self._models = self.objects.as_given if models is None else models
        self.script = Script()
        self.gradients = Gradients(self._models)
        self.bucket_orders: BucketOrders | None = None
        if rank_group.world_size > 2:  # a sum of two is the same in either order
            from hydroslurm.training.buckets import BucketOrders

            self.bucket_orders = BucketOrders(self._models)
        self.trackers = trackers
        self.parts: dict[str, Stateful] = {}
        self.noted: dict[str, Callable[[], Any]] = {}
        self.pending: Mapping[str, Any] | None = None

    def use(self, loader: Any) -> None:
        """Take batches from this loader."""
        group = self._rank_group
        self.cursor.use(loader, rank=group.rank, world_size=group.world_size)

    def add(self, name: str, thing: Any, *, per_rank: bool = False) -> None:
        """Register one more object.

        Raises:
            UsageError: the name is taken, or it has no state.
        """
        own = self.cursor.registered
        require_registrable(name, thing, taken=(*self.objects.names(), *own.names()))
        if per_rank or isinstance(thing, rng.KINDS):
            own.add(name, thing)
        else:
            self.objects.add(name, thing)

    def by_name(self) -> dict[str, Any]:
        """All that is registered."""
        return {**self.objects.by_name(), **self.cursor.registered.by_name()}

    def remember(self, roots: Callable[[], Mapping[str, Any]] = dict, **options: Any) -> None:
        """The script makes all this in each attempt: what it changes from now on is saved.

        Of several ranks of a framework each has buffers of its own: they see other batches, and
        their BatchNorm other statistics. FSDP never compares them, and DDP only where it trains,
        not in an evaluation.

        Args:
            roots, options: as of :class:`Script`; by default what has a place of its own in a
                checkpoint is left out, the loader and registered generators.
        """
        world_size = self._rank_group.world_size
        self.script = Script(
            self._models,
            roots,
            world_size=world_size,
            all_buffers=self._is_deferred and world_size > 1,
            **{"saved": self.cursor.saved_apart, **options},
        )
        self.script.note()
        self.objects.note()

    # --- saving
    # --------------------------------------------------------------------------------------------

    def capture(self) -> State:
        """All of it, now. Tensors are the objects' own: copy, or save, before they change."""
        own = self.own_state()
        return State(shared=self.objects.states(), own=own)

    def own_state(self) -> Mapping[str, Any]:
        """What this rank saves for itself."""
        if self.pending is not None:
            return self.pending
        own = self.with_script(self.position())
        more = {**self.noted, **{name: part.state_dict for name, part in self.parts.items()}}
        return {**own, **{name: state() for name, state in more.items()}}

    def position(self) -> Mapping[str, Any]:
        """Where this rank is, with what belongs to that place."""
        own = self.cursor.state()
        more = {name: part.state_dict() for name, part in self._at_place().items()}
        return {**own, **{name: state for name, state in more.items() if state}}

    def with_script(self, own: Mapping[str, Any]) -> Mapping[str, Any]:
        """With what no ``state_dict()`` has, as far as the script has changed it."""
        state = self.script.state_dict()
        if lost := self.script.take_lost():
            self._rank_group.log(*lost)
        return {**own, "script": state} if state else own

    def _at_place(self) -> dict[str, Any]:
        orders = {} if self.bucket_orders is None else {"bucket_orders": self.bucket_orders}
        return {**orders, "gradients": self.gradients, "trackers": self.trackers}

    # --- giving back
    # --------------------------------------------------------------------------------------------

    def load_newest(
        self, store: CheckpointStore, *, fence: Fence, origin: Checkpoint | None, load: bool
    ) -> tuple[Checkpoint | None, State]:
        """Find the checkpoint that all ranks resume from, and read it, if it is to be loaded.

        Args:
            origin: of another run, which somebody has named: what to start from while the store
                has none.

        Raises:
            StaleAttempt: a newer attempt has removed it meanwhile.
            CheckpointError, OSError: it cannot be read.
        """
        state = State({}, {})

        def read(candidate: Checkpoint) -> None:
            nonlocal state
            if candidate is origin:
                other, peers = candidate.path.parent, store.peers
                state = self._load(
                    CheckpointStore(other, storage=AnyonesStorage(), peers=peers), candidate
                )
            else:
                state = self._load(store, candidate)

        try:
            found = newest_good(store, topic="resume", load=read if load else None)
        except (CheckpointError, OSError):
            fence.check(f"loading from {store.directory}")
            raise
        if found is None and origin is not None:
            found = origin
            if load:
                read(found)
        return found, state

    def _load(self, store: CheckpointStore, checkpoint: Checkpoint) -> State:
        """The state of a checkpoint, as this rank resumes from it.

        With another world size than at the save, no rank can take over a saved rank's own state as
        it is. It still gets what all ranks share; its position in the data is that of rank 0, which
        counts what all ranks have consumed; its random numbers, and what else it has registered for
        itself, are its own if a rank of this number took part in the save, otherwise those of rank
        0, from which its random numbers are derived.
        """
        rank = self._rank_group.rank
        state = store.load(checkpoint, like=self.objects.templates())
        if checkpoint.manifest.world_size == self._rank_group.world_size:
            return state
        first: Mapping[str, Any] = store.load_own(checkpoint, 0)
        if "rng" in state.own:
            kept = {key: state.own[key] for key in _OF_A_RANK if key in state.own}
        else:
            kept = {"rng": rng.for_new_rank(first["rng"], rank), "new_rank": rank}
        return State(shared=state.shared, own={**first, **kept})

    def differences(self, manifest: Manifest, state: State) -> Iterator[str]:
        """Report what has changed since the checkpoint was saved. Of the loaders, which may differ
        per rank, only rank 0 reports.

        Raises:
            StateMismatch: the run cannot resume from it.
        """
        from hydroslurm.training.readback import changed_objects, changes

        group = self._rank_group
        objects, was = self.objects.by_name(), Composition.of(manifest)
        yield from changed_objects(objects, state.shared, classes=was.classes)
        if group.rank == 0:
            data, loading = state.own.get("data"), self.cursor.loading
            yield from changes(manifest, loading, world_size=group.world_size, data=data)

    def restore(self, state: State, *, source: str) -> None:
        """Give the objects their states, and put this rank where it was. A framework has both when
        its training begins; see :meth:`put_back`.

        Args:
            source: of the state, for messages.
        """
        from hydroslurm.training.readback import read_back

        lost = read_back(self.objects.by_name(), state.shared, source=source)
        counters = state.own["counters"]
        self.cursor.step, self.cursor.epoch = counters["step"], counters["epoch"]
        if self._is_deferred:
            self.pending = state.own
        else:
            self._rank_group.log(*lost)
            self.put_back(state.own)

    def put_back(self, own: Mapping[str, Any]) -> None:
        """Put what this rank has saved for itself in its place."""
        for name, part in self.parts.items():
            if name in own:
                part.load_state_dict(own[name])
        self.script.restore(own.get("script", {}), new_rank=own.get("new_rank"))
        for name, part in self._at_place().items():
            part.load_state_dict(own.get(name, {}))
        self.cursor.load(own)

    def begin(self) -> None:
        """A framework's first step comes next: put back what was loaded.

        Raises:
            StateMismatch: an own state that nobody takes, or that does not fit.
        """
        own, self.pending = self.pending, None
        if own is not None:
            known = {"rng", "counters", "registered", "script", "bucket_orders", *self._at_place()}
            known |= {*self.parts, *self.noted, *self.cursor.registered.names()}
            for name in (*own, *own.get("registered", {})):
                if name not in known and name != "new_rank":
                    raise StateMismatch(
                        f"the checkpoint has a state of {name!r} for this rank, which this script "
                        "does not have any more; begin anew with another directory="
                    )
            self.put_back(own)
            self.cursor.restore_rng()  # nothing is left to open
        self.gradients.begin()
        self.script.begin()

    # --- what is found in it
    # --------------------------------------------------------------------------------------------

    def require_all_given(self, first_step: FirstStep, remedies: Remedies) -> None:
        """Find out behind the first step of a loop what a resumed run would lack.

        Raises:
            UsageError: the first such thing, with what to do.
        """
        states = {**self.objects.states(), **self.cursor.registered.states()}
        message = first_step.missing(self.by_name(), states, remedies)
        for one in self.script.unkept() if message is None else ():
            if one.why == MOVED:
                message = f"{one}. {remedies.batches} If that does no harm: {remedies.unchecked}"
            else:
                self._rank_group.log(one)
        self.script.accept_optimizers()
        if message is not None:
            raise UsageError(message)

    def findings(self, state: State) -> Iterator[object]:
        """What can be said once the optimizer has its own state.

        Args:
            state: behind the first step.
        """
        yield from self.script.unkept()
        if self.bucket_orders is not None:
            yield from self.bucket_orders.findings()
        if message := recompiles(self.objects.as_given().get("model"), self.cursor.loader):
            yield message
        if most := largest(state.own.get("script", {})):
            yield (
                f"{most}: each rank saves them with each checkpoint, as the next step may need "
                "them. Where none does, set them to None behind their use"
            )


_LOOKED_AT = 16
"""Weights, spread over a model and its parts, by which it is seen that an optimizer has stepped."""
Part: TypeAlias = tuple[str, str]
"""A model's name, and the first word in the names of some of its parameters."""


class Gradients:
    """Those that a loop of this rank adds up over several of its steps.

    Most loops leave gradients behind that nobody uses again. Those of a part of a model count from
    the first step on that was trained without an update of its weights; they are looked at only in
    such steps and when something is saved.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._weights: dict[Part, list[torch.Tensor]] = {}
        self._versions: list[int] = []
        self._adding_up: set[Part] = set()
        self._loaded: Mapping[str, Mapping[str, torch.Tensor]] = {}

    def begin(self) -> None:
        """The first step comes next. What was loaded is put in place again: a loop may have zeroed
        its gradients before it begins."""
        parts: dict[Part, list[torch.Tensor]] = {}
        for name, model in modules_in(self._models()).items():
            for key, one in model.named_parameters():
                if one.requires_grad:
                    parts.setdefault((name, _part(key)), []).append(one)
        most = max(1, _LOOKED_AT // max(1, len(parts)))
        self._weights = {part: all_[:: -(-len(all_) // most)] for part, all_ in parts.items()}
        self._versions = self._versions_now()
        self._put()

    def end_step(self) -> None:
        """A safe point was reached."""
        self._loaded = {}
        before, self._versions = self._versions, self._versions_now()
        for part, now, then in zip(self._weights, self._versions, before, strict=True):
            if now == then and part not in self._adding_up and self._are_of_use(part):
                self._adding_up.add(part)

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Model -> parameter -> gradient; empty for a loop that updates in each step."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name, key, grad in self._gradients(self._adding_up):
            if grad.any():
                found.setdefault(name, {})[key] = grad
        return found

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Raises:
        StateMismatch: a model has no such parameter.
        """
        self._loaded = state
        self._adding_up.update((name, _part(key)) for name, grads in state.items() for key in grads)
        self._put()

    def _put(self) -> None:
        models = modules_in(self._models()) if self._loaded else {}
        for name, grads in self._loaded.items():
            parameters = dict(models[name].named_parameters()) if name in models else {}
            for key, saved in grads.items():
                one = parameters.get(key)
                if one is None or local_of(one).shape != saved.shape:
                    raise StateMismatch(
                        f"the checkpoint has a gradient of shape {list(saved.shape)} for {key} of "
                        f"{name}, which this model does not have; use another directory= to start "
                        "anew"
                    )
                one.grad = torch.zeros_like(one)
                local_of(one.grad).copy_(saved)

    def _are_of_use(self, part: Part) -> bool:
        """Whether there are any, and no GradScaler has left the step out because of them."""
        grads = [one for _, _, one in self._gradients({part})]
        return any(one.any() for one in grads) and all(one.isfinite().all() for one in grads)

    def _versions_now(self) -> list[int]:
        return [sum(one._version for one in some) for some in self._weights.values()]

    def _gradients(self, parts: Collection[Part]) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Those of some parts, each with the names of its model and its parameter."""
        for name, model in modules_in(self._models()).items() if parts else ():
            for key, one in model.named_parameters():
                is_there = one.grad is not None and one.grad.layout is torch.strided
                if is_there and (name, _part(key)) in parts:
                    yield name, key, local_of(one.grad).detach()


def _part(key: str) -> str:
    return key.partition(".")[0]

"""What the writer of a loop can forget, found before it costs anything.

A run that forgets an optimizer, a scheduler or a position resumes without an error and trains on
with other numbers. So the first step of each attempt is watched, by hooks that are removed behind
it: later steps cost nothing. What lives in objects and variables of the script is part of the run
by itself (:mod:`hydroslurm.checkpoint.census`). Beside that: that a run has to go on from its
checkpoint, and that steps have to be counted.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader as torch_dataloader

from hydroslurm.checkpoint.tree import local_of
from hydroslurm.errors import UsageError
from hydroslurm.training.objects import inside

_GIVE = 'Give it: Run({0}=...) for one, run.register("{0}_2", {0}) for each further one.'
_OTHERWISE = "If what you register saves it in another form: {loop}"


@dataclass(frozen=True)
class Remedies:
    """What to write for each thing that a loop uses and its run lacks: whole sentences.

    Attributes:
        weights: that an optimizer trains.
        batches: from an iterator without a position.
        unchecked: how to write the loop so that nobody looks.
    """

    optimizer: str
    scheduler: str
    scaler: str
    weights: str
    batches: str
    unchecked: str


def own_loop(unchecked: str) -> Remedies:
    """Of a loop over ``run.batches()`` or ``run.steps()``."""
    return Remedies(
        optimizer=_GIVE.format("optimizer"),
        scheduler=_GIVE.format("scheduler"),
        scaler=_GIVE.format("scaler"),
        weights=(
            'Give the module that has them: Run(model=...) for one, run.register("model_2", module)'
            " for each further one, torch.nn.ParameterList([tensor]) for a tensor that belongs to "
            "none."
        ),
        batches=(
            "Let the run hand them out: Run(loader=loader) and `for batch in "
            "run.batches(epochs=...)`; or have a get_batch(step) choose the samples by the number "
            "of the step."
        ),
        unchecked=unchecked,
    )


class FirstStep:
    """The optimizers that step, and the data loaders' iterators that move, while it is
    :meth:`watched`.

    Attributes:
        remedies: for what is used and not saved, as long as it is looked for.
        passes_over: the iterators that move now have positions.
    """

    def __init__(self) -> None:
        self.remedies: Remedies | None = None
        self.passes_over = False
        self._optimizers: dict[int, Optimizer] = {}
        self._iterators: dict[int, weakref.ref[Any]] = {}
        self._scalers: dict[int, GradScaler] = {}
        self._undo = contextlib.ExitStack()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Around the body of a step, or of one of its batches; watches if there are remedies."""

        def stepped(optimizer: Optimizer, *_: Any) -> None:
            self._optimizers[id(optimizer)] = optimizer

        if self.remedies is not None:
            self._undo.callback(register_optimizer_step_post_hook(stepped).remove)
            self._undo.callback(self._watch_iterators())
            self._undo.callback(self._watch_scalers())
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        """No hook stays behind."""
        self._undo.close()

    def missing(self, objects: dict[str, Any], states: Any, remedies: Remedies) -> str | None:
        """The first thing that a resumed run would lack, with what to do; None if there is none.
        Lets go of the objects that were seen.

        Args:
            objects: what is registered, by name.
            states: what would be saved of them.
        """
        message = self._not_optimized(objects, states, _Tensors(states), remedies)
        if message := message or self._not_scaled(objects, states, remedies):
            message += f" {_OTHERWISE.format(loop=remedies.unchecked)}"
        else:
            message = self._iterated(objects, remedies)
        for seen in (self._optimizers, self._iterators, self._scalers):
            seen.clear()
        return message

    def _not_optimized(
        self, objects: dict[str, Any], states: Any, saved: _Tensors, remedies: Remedies
    ) -> str | None:
        """An optimizer that steps, its weights, its scheduler."""
        optimizers = list(self._optimizers.values())
        is_sharded = any(_is_fsdp1(thing) for thing in objects.values())  # saves gathered copies
        for optimizer in optimizers:
            if is_sharded or any(_is_around(thing, optimizer) for thing in objects.values()):
                continue
            tensors = _state_tensors(optimizer)
            if all(map(saved.have, tensors)) if tensors else _saves_optimizer(objects, states):
                continue  # an object of the script saves it among other things
            return (
                f"{_named(optimizer)} has stepped and is not part of this run: resumed, it would "
                f"begin anew. {remedies.optimizer}"
            )
        for optimizer in optimizers:
            if not is_sharded and (message := _weights_missing(optimizer, saved)):
                return f"{message} {remedies.weights}"
        for optimizer in optimizers:
            # a scheduler that was made for a wrapper sets the rates of what is inside
            known = [optimizer, *(one for one in objects.values() if _is_around(one, optimizer))]
            if any(map(_is_scheduled, known)) and not _saves_scheduler(objects, states, known):
                return (
                    f"a scheduler sets the learning rate of {_named(optimizer)}, and none is part "
                    f"of this run: resumed, it would begin anew. {remedies.scheduler}"
                )
        return None

    def _not_scaled(self, objects: dict[str, Any], states: Any, remedies: Remedies) -> str | None:
        known = {id(thing) for thing in objects.values()}
        is_saved = any(
            isinstance(node, dict) and {"scale", "_growth_tracker"} <= node.keys()
            for node in _nodes(states)
        )
        missing = [one for one in self._scalers.values() if id(one) not in known]
        if is_saved or not missing:
            return None
        return (
            f"a GradScaler (scale {missing[0].get_scale():g}) has scaled this step and is not part "
            "of this run: resumed, it would begin with its first scale again. "
            f"{remedies.scaler}"
        )

    def _iterated(self, objects: dict[str, Any], remedies: Remedies) -> str | None:
        if any(one() is not None for one in self._iterators.values()):
            gc.collect()  # one with workers may be kept by a cycle
        known = [getattr(thing, "_iterator", None) for thing in objects.values()]
        alive = [it for one in self._iterators.values() if (it := one()) is not None]
        if all(any(it is one for one in known) for it in alive):
            return None
        return (
            "a batch was taken from an iterator over a DataLoader, which has no position that is "
            "saved: resumed, it would begin with its first batches again. "
            f"{remedies.batches} If the script skips what was read already: {remedies.unchecked}"
        )

    def _watch_scalers(self) -> Callable[[], None]:
        own, seen = GradScaler.update, self._scalers

        def update(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
            if scaler.is_enabled():
                seen[id(scaler)] = scaler
            own(scaler, *args, **kwargs)

        def put_back() -> None:
            if GradScaler.update is update:
                GradScaler.update = own  # type: ignore[method-assign]

        GradScaler.update = update  # type: ignore[assignment,method-assign]
        return put_back

    def _watch_iterators(self) -> Any:
        kind: Any = torch_dataloader._BaseDataLoaderIter
        original = kind.__next__

        def noted(iterator: Any) -> Any:
            try:
                batch = original(iterator)
            except StopIteration:  # an evaluation, which begins anew each time
                self._iterators.pop(id(iterator), None)
                raise
            if torch.is_grad_enabled() and not self.passes_over:
                self._iterators[id(iterator)] = weakref.ref(iterator)
            return batch

        def put_back() -> None:
            if kind.__next__ is noted:
                kind.__next__ = original

        kind.__next__ = noted
        return put_back


class _Tensors:
    """The tensors of a state: found by their memory, or, where the state has copies, by value."""

    def __init__(self, states: Any) -> None:
        self._places: set[Any] = set()
        self._alike: dict[Any, list[torch.Tensor]] = {}
        for node in _nodes(states):
            if isinstance(node, torch.Tensor):
                local = local_of(node).detach()
                self._places.add(_place(local))
                self._alike.setdefault((local.dtype, local.shape), []).append(local)

    def have(self, tensor: torch.Tensor) -> bool:
        local = local_of(tensor).detach()
        if local.numel() == 0 or local.is_meta or _place(local) in self._places:
            return True
        alike = self._alike.get((local.dtype, local.shape), ())
        return any(torch.equal(local.cpu(), one.cpu()) for one in alike)


def _weights_missing(optimizer: Optimizer, saved: _Tensors) -> str | None:
    params = [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if param.grad is not None or param.requires_grad
    ]
    missing = [param for param in params if not saved.have(param)]
    if not missing:
        return None
    return (
        f"{_named(optimizer)} trains {len(missing)} parameters that are not part of this run, the "
        f"first of shape {list(missing[0].shape)}: resumed, they would begin anew."
    )


def _is_around(thing: Any, optimizer: Optimizer) -> bool:
    """Whether it is this optimizer, or a wrapper that looks like one."""
    inner = (getattr(thing, "optimizer", None), getattr(thing, "optim", None))
    return thing is optimizer or (hasattr(thing, "param_groups") and optimizer in inner)


def _is_scheduled(optimizer: Optimizer) -> bool:
    """A scheduler wraps the ``step`` of its optimizer; ReduceLROnPlateau does not."""
    step = vars(optimizer).get("step")
    return hasattr(step, "_wrapped_by_lr_sched") or hasattr(step, "_with_counter")


def _saves_scheduler(objects: dict[str, Any], states: Any, known: list[Any]) -> bool:
    """Whether a scheduler is registered of one that is known, or something that may hold one."""
    return any(
        not isinstance(thing, LRScheduler)
        or any(getattr(thing, "optimizer", one) is one for one in known)
        for name, thing in objects.items()
        if _has_key(states.get(name), "last_epoch")
    )


def _saves_optimizer(objects: dict[str, Any], states: Any) -> bool:
    """Whether something that is no optimizer holds one."""
    return any(
        not isinstance(thing, Optimizer) and _has_key(states.get(name), "param_groups")
        for name, thing in objects.items()
    )


def _has_key(tree: Any, key: str) -> bool:
    return any(isinstance(node, dict) and key in node for node in _nodes(tree))


def _state_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]


def _named(optimizer: Optimizer) -> str:
    shapes = [list(param.shape) for group in optimizer.param_groups for param in group["params"]]
    more = f" and {len(shapes) - 2} more" if len(shapes) > 2 else ""
    listed = ", ".join(map(str, shapes[:2]))
    return f"{type(optimizer).__name__} (of parameters of shape {listed}{more})"


def _is_fsdp1(thing: Any) -> bool:
    return isinstance(thing, torch.nn.Module) and any(
        type(module).__name__ == "FullyShardedDataParallel" for module in thing.modules()
    )


def _nodes(tree: Any) -> Iterator[Any]:
    yield tree
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return
    for one in tree:
        yield from _nodes(one)


def _place(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape


# --- a loop of one's own
# ------------------------------------------------------------------------------------------------


class LoopWatch:
    """Whether the optimizers of a run have stepped, and whether somebody counts the steps.

    Optimizers are told apart and hooked only until the loop has shown at its safe points that it
    counts. Their own counters would not do: SGD has none, others have one for each parameter, which
    a load replaces.

    Attributes:
        on: nobody has been seen to count yet.
    """

    def __init__(self) -> None:
        self.on = True
        self._hooks: list[Any] = []
        self._steps: Counter[int] = Counter()
        self._seen: Counter[int] = Counter()
        self._uncounted: Counter[int] = Counter()
        self._begun_at: int | None = None

    def add(self, thing: Any) -> None:
        """Watch this object, if it is an optimizer whose hooks torch calls."""
        if not self.on or not hasattr(getattr(type(thing), "step", None), "__wrapped__"):
            return  # a wrapper around an optimizer may take hooks and never call them
        if not hasattr(thing, "_optimizer_step_post_hooks"):
            return
        steps, place = self._steps, len(self._steps)
        steps[place] = 0
        self._hooks.append(thing.register_step_post_hook(lambda *_: steps.update([place])))

    @property
    def may_have_trained(self) -> bool:
        """Whether an optimizer has stepped, or there is none by which that could be seen."""
        return not self._steps or any(self._steps.values())

    def begin(self, step: int, *, in_loop: bool) -> None:
        """The run begins at this step; in the middle of a loop, or after what was a warm-up."""
        self._begun_at = step
        if not in_loop:
            self._seen = self._steps.copy()

    def at_safe_point(self, step: int) -> None:
        """A loop of one's own says that a step is complete.

        One optimizer has to step twice, each time with a safe point behind it: a loop that
        accumulates, evaluates, or trains two networks in turns calls safe points at one step too.

        Raises:
            UsageError: one has stepped and stepped, and the count is what it was at the beginning.
        """
        if step != self._begun_at:
            self.close()
            return
        self._uncounted.update((self._steps - self._seen).keys())
        self._seen = self._steps.copy()
        if max(self._uncounted.values(), default=0) < 2:
            return
        raise UsageError(
            f"the optimizer has stepped before each of two safe points, and run.step is {step} as "
            "at the beginning: nothing would be saved, because checkpoints are named after steps. "
            "Count each step before its safe point: run.step += 1; run.safe_point(). Where a step "
            "is not complete, call run.check_stop() instead"
        )

    def close(self) -> None:
        """No hook stays behind."""
        self.on = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


# --- graphs that a resume compiles in another order
# ------------------------------------------------------------------------------------------------

_RECOMPILES = (
    "torch.compile compiles this model again, for batches of any size, at the smaller last batch "
    "of an epoch ({last} of {whole}); a run that was stopped begins with the graph for whole "
    "batches, and may differ in the last bits. torch.compile(model, dynamic=False) or the loader's "
    "drop_last=True makes them equal"
)


def recompiles(model: Any, loader: Any) -> str | None:
    """What to say of a compiled model whose graphs depend on the batches that this process has
    seen; None where they do not, or where that cannot be told."""
    context = None
    while model is not None:
        context = getattr(model, "dynamo_ctx", None) or context
        model = inside(model)
    if context is None or getattr(context, "_dynamic", False) is not None:
        return None
    whole = getattr(loader, "batch_size", None)
    if not isinstance(whole, int) or getattr(loader, "drop_last", True):
        return None
    try:
        last = len(loader.sampler) % whole
    except (TypeError, AttributeError):  # a stream
        return None
    return _RECOMPILES.format(last=last, whole=whole) if last else None

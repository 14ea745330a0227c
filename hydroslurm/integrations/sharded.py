"""What is saved of a training whose weights are sharded over the ranks: each rank's shards.

The frameworks' own checkpoints gather them, on rank 0 or by a collective for each layer. Here each
rank writes what it has, and nothing is gathered.

With FSDP2 (Lightning's ``ModelParallelStrategy``) weights and optimizer states are DTensors, which
a Run saves as such, and loads with another number of ranks too. Lightning's ``FSDPStrategy`` (the
first FSDP) has flat parameters: a rank's part of one ends anywhere in a weight, and is padded for
the number of ranks. It is that rank's own state, for as many ranks only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hydroslurm.errors import StateMismatch, UsageError
from hydroslurm.integrations.framework import FrameworkSession
from hydroslurm.training.contents import fingerprint
from hydroslurm.training.objects import bare
from hydroslurm.training.readback import load_optimizer

FLAT_SHARDS = "shards"
"""The name of what each rank saves of flat parameters."""


def fingerprint_of_all(
    weights: Mapping[str, Any], *, device: torch.device, add: Callable[[torch.Tensor], Any]
) -> int:
    """As :func:`hydroslurm.training.contents.fingerprint`, over all ranks: so that all
    see a change that only some of them have a part of.

    Args:
        add: the collective that adds up a tensor of all ranks.
    """
    here = sum(fingerprint(weights).values()) % 2**48
    return int(add(torch.tensor(here, dtype=torch.int64, device=device)))


# --- Lightning's
# ------------------------------------------------------------------------------------------------


def shards_of(trainer: Any) -> FlatShards | Distributed | None:
    """How the strategy of this trainer shards; None where each rank has all of the state."""
    names = {kind.__name__ for kind in type(trainer.strategy).__mro__}
    if "FSDPStrategy" in names:
        return FlatShards(trainer)
    return Distributed(trainer) if "ModelParallelStrategy" in names else None


@contextmanager
def nothing_gathered(strategy: Any) -> Iterator[None]:
    """Within it the strategy gives Lightning's checkpoint no weights, and no optimizer states but
    for the settings of their groups."""
    ours = {
        "lightning_module_state_dict": dict,
        "optimizer_state": lambda one: {"param_groups": one.state_dict()["param_groups"]},
    }
    before = {name: vars(strategy)[name] for name in ours if name in vars(strategy)}
    vars(strategy).update(ours)
    try:
        yield
    finally:
        for name in ours:
            del vars(strategy)[name]
        vars(strategy).update(before)


class Distributed:
    """The weights and the optimizers of one fit as DTensors: objects of the run like those of a
    loop of one's own."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def weights(self) -> Mapping[str, Any]:
        """What this rank has of the model: name -> tensor."""
        return self._trainer.lightning_module.state_dict()  # type: ignore[no-any-return]

    def join(self, run: FrameworkSession) -> None:
        """Make them part of a run, which is resumed after this. The strategy is set up."""
        run.session.register("model", self._trainer.lightning_module)
        for number, optimizer in enumerate(self._trainer.optimizers):
            run.session.register(f"optimizer {number}", optimizer)


class FlatShards:
    """The shards of the first FSDP, as one rank has them in memory between two steps.

    They are read and written in place, without FSDP's own ``state_dict``, which gathers, and
    without ``LOCAL_STATE_DICT``, which exchanges pickles for each layer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def weights(self) -> Mapping[str, torch.Tensor]:
        model = self._trainer.model
        found: dict[str, torch.Tensor] = {}
        parts: set[int] = set()
        for name, flat in _flat_parameters(model):
            # once it has trained, what it shows may be the whole parameter, and this is the shard
            found[f"{name}.flat"] = getattr(flat, "_local_shard", flat).detach()
            parts.update(map(id, (flat, *(getattr(flat, "_params", None) or ()))))
        for name, tensor in model.named_parameters():
            if id(tensor) not in parts:  # of a module that FSDP was told to ignore
                found[name] = tensor.detach()
        for prefix, module in model.named_modules():
            for name, tensor in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    found[f"{prefix}.{name}"] = tensor
        return found

    def join(self, run: FrameworkSession) -> None:
        """Make them part of a run, which is resumed after this."""
        run.own[FLAT_SHARDS] = self

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._place(),
            "weights": dict(self.weights()),
            "optimizers": [one.state_dict() for one in self._trainer.optimizers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises:
        StateMismatch: they were saved by other ranks, of another model, or with other optimizers.
        """
        place = self._place()
        if state["world_size"] != place["world_size"] or state["rank"] != place["rank"]:
            raise StateMismatch(
                f"the shards were saved by rank {state['rank']} of {state['world_size']}, and this "
                f"is rank {place['rank']} of {place['world_size']}: FSDP's flat parameters fit as "
                f"many ranks only. Start {state['world_size']} of them; ModelParallelStrategy with "
                "fully_shard() resumes with another number"
            )
        weights, saved = self.weights(), state["weights"]
        odd = [
            name for name in {**weights, **saved} if _shape(weights, name) != _shape(saved, name)
        ]
        optimizers = self._trainer.optimizers
        if odd or len(optimizers) != len(state["optimizers"]):
            raise StateMismatch(
                f"the checkpoint has {len(saved)} shards and {len(state['optimizers'])} optimizers,"
                f" and this fit {len(weights)} and {len(optimizers)}; of another shape are: "
                f"{', '.join(odd[:3]) or 'none'}. Give the model and the strategy that it was "
                "saved with, or begin anew with another directory="
            )
        with torch.no_grad():
            for name, tensor in weights.items():
                tensor.copy_(saved[name])
        for number, optimizer in enumerate(optimizers):
            try:
                load_optimizer(optimizer, state["optimizers"][number])
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                raise StateMismatch(
                    f"what was saved does not fit optimizer {number} ({type(optimizer).__name__}): "
                    f"{error}"
                ) from error

    def _place(self) -> dict[str, int]:
        return {"rank": self._trainer.global_rank, "world_size": self._trainer.world_size}


def _flat_parameters(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        handle = getattr(module, "_handle", None)
        if type(module).__name__ == "FullyShardedDataParallel" and handle is not None:
            yield name, handle.flat_param


def _shape(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Size | None:
    found = tensors.get(name)
    return None if found is None else found.shape


# --- transformers'
# ------------------------------------------------------------------------------------------------


def is_sharded(trainer: Any) -> bool:
    """Whether it trains with FSDP, of any version."""
    return bool(getattr(trainer, "is_fsdp_enabled", False))


def why_not(trainer: Any) -> str | None:
    """What keeps this sharded Trainer from being made preemptible."""
    if getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
        return 'FSDP of version 1 (fsdp_config={"version": 2} makes it FSDP2)'
    if not hasattr(trainer, "_prepare_for_training"):
        return "FSDP before transformers 5"
    return "FSDP and model_init" if trainer.model_init is not None else None


class Sharded:
    """The model and the optimizer of one ``train()``: part of the run, so they have to be there
    when it is resumed, and that is before ``train()``. They are made and sharded here, as by
    transformers itself for an ``evaluate()`` that comes before, and ``train()`` finds them ready.
    """

    def __init__(self, trainer: Any, run: FrameworkSession) -> None:
        """Raises:
        UsageError: the optimizer has other parameters than the model: those of before.
        """
        self._trainer = trainer
        if type(trainer.optimizer).__name__ != "AcceleratedOptimizer":
            trainer.create_optimizer()
            trainer.model, trainer.optimizer = trainer.accelerator.prepare(
                trainer.model, trainer.optimizer
            )
            trainer.model_wrapped = trainer.model
        self._prepared = (trainer.model, trainer.optimizer)
        self._settings: list[dict[str, Any]] = []
        _require_own(trainer)
        run.session.register("model", bare(trainer.model))
        run.session.register("optimizer", trainer.optimizer.optimizer)

    def prepare_for_training(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, to which what is prepared is not given to accelerate once more: that
        would find a parameter by the address of its shard, which all empty shards share."""
        accelerator, (model, optimizer) = self._trainer.accelerator, self._prepared
        prepare = accelerator.prepare
        self._settings = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

        def unless_prepared(*given: Any, **options: Any) -> Any:
            if not all(one is model or one is optimizer for one in given):
                return prepare(*given, **options)
            return given if len(given) > 1 else given[0]

        accelerator.prepare = unless_prepared
        # the loop has had accelerate forget what it had prepared
        accelerator._models.append(model)
        accelerator._optimizers.append(optimizer)
        try:
            return own(*args, **kwargs)
        finally:
            del accelerator.prepare

    def put_settings_back(self) -> None:
        """Learning rates as they were loaded: the scheduler was made behind that, and has set its
        first one."""
        groups = self._trainer.optimizer.param_groups
        for group, settings in zip(groups, self._settings, strict=True):
            group.update(settings)

    def fingerprint(self) -> int:
        """Of all weights, equal on all ranks. A collective."""
        accelerator = self._trainer.accelerator
        return fingerprint_of_all(
            bare(self._trainer.model).state_dict(),
            device=accelerator.device,
            add=lambda total: accelerator.reduce(total, reduction="sum"),
        )


def _require_own(trainer: Any) -> None:
    mine = {id(one) for one in trainer.model.parameters()}
    groups = trainer.optimizer.param_groups
    if strange := sum(id(one) not in mine for group in groups for one in group["params"]):
        raise UsageError(
            f"{strange} parameters of the optimizer are not the sharded model's; make it of "
            "trainer.model, or let the Trainer make it"
        )

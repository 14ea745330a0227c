"""A Lightning fit whose weights are sharded over the ranks; loaded for such a strategy only.

Lightning's own checkpoints gather weights that are sharded. Here each rank writes its shards, and
nothing is gathered. With FSDP2 (``ModelParallelStrategy``) weights and optimizer states are
DTensors, which another number of ranks may load. ``FSDPStrategy`` (the first FSDP) has flat
parameters: a rank's part of one ends anywhere in a weight, and is padded for the number of ranks.
It is that rank's own state, for as many ranks only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from hydroslurm.errors import StateMismatch
from hydroslurm.integrations.framework import FrameworkSession
from hydroslurm.training.readback import load_optimizer

FLAT_SHARDS = "shards"
"""The name of what each rank saves of flat parameters."""


@contextmanager
def _nothing_gathered(strategy: Any) -> Iterator[None]:
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

    def put_back(self, run: FrameworkSession) -> None:
        """The run has loaded them."""

    def nothing_gathered(self) -> AbstractContextManager[None]:
        """See :func:`_nothing_gathered`."""
        return _nothing_gathered(self._trainer.strategy)


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
        run.contents.parts[FLAT_SHARDS] = self

    def put_back(self, run: FrameworkSession) -> None:
        """What was saved, if the run goes on from a checkpoint that has them."""
        if (flat := run.own_loaded.get(FLAT_SHARDS)) is not None:
            self.load_state_dict(flat)

    def nothing_gathered(self) -> AbstractContextManager[None]:
        """See :func:`_nothing_gathered`."""
        return _nothing_gathered(self._trainer.strategy)

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

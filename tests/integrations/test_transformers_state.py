"""What is saved of a Trainer's attributes and of the batch that was fetched ahead, and how it comes
back."""

from __future__ import annotations

import functools
import sys
from collections import UserDict
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hydroslurm.checkpoint.tree import decode, encode
from hydroslurm.errors import StateMismatch, UnsavableState
from hydroslurm.integrations.held_loader import MOST_BYTES, is_saved, packed, unpacked
from hydroslurm.integrations.transformers_train import (
    LoopState,
    OtherModules,
    is_sharded,
    other_modules,
    remember,
    why_not,
)
from hydroslurm.training.script import Script


@pytest.fixture(autouse=True)
def _callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without transformers; none of these trainers has a callback."""
    module = ModuleType("transformers.trainer_callback")
    module.ExportableState = int  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def trainer(**attributes: Any) -> Any:
    flags = ("training_stop", "epoch_stop", "save", "evaluate", "log")
    control = SimpleNamespace(**{f"should_{name}": False for name in flags})
    return SimpleNamespace(
        model=torch.nn.Linear(2, 2),
        args=SimpleNamespace(device=torch.device("cpu")),
        callback_handler=SimpleNamespace(callbacks=[]),
        control=control,
        **{"optimizer": None, "lr_scheduler": None, **attributes},
    )


def remembered(trainer: Any) -> Script:
    """What a run remembers of a trainer."""
    made = []

    def note(roots: Any, **options: Any) -> None:
        made.append(Script(lambda: {"model": trainer.model}, roots, **options))
        made[0].note()

    remember(trainer, SimpleNamespace(remember=note))  # type: ignore[arg-type]
    return made[0]


def test_tensors_go_to_the_device_they_were_on() -> None:
    """What was computed on an accelerator is there again; checkpoints are read on the CPU."""
    there = trainer(kept=None, own=None)
    was = remembered(there)
    there.kept, there.own = [{"ids": torch.ones(2)}], [torch.ones(2)]
    state = was.state_dict()
    state["objects"]["trainer"]["kept"][1].append("on device")
    here = trainer(kept=None, own=None)
    here.model.to("meta")
    remembered(here).restore(state)
    assert [here.kept[0]["ids"].device.type, here.own[0].device.type] == ["meta", "cpu"]


@pytest.mark.parametrize("is_training", [True, False])
def test_the_mode_of_the_model(is_training: bool) -> None:
    """Models that are loaded are in evaluation mode; one that trains is not."""
    before, loaded = trainer(), LoopState(trainer())
    before.model.train(is_training)
    loaded.load_state_dict(LoopState(before).state_dict())
    assert loaded.is_training is is_training


def test_what_is_lost_is_named() -> None:
    """A buffer that is filled with something else than numbers and tensors, and nothing else."""
    one = trainer(buffer=None, count=0, name=None, flag=None, optimizer=None, known=object())
    contents = remembered(one)
    one.buffer, one.count, one.name, one.flag = [object()], 3, "a", True
    one.optimizer, one.later = object(), object()
    assert [one.path for one in contents.unkept()] == ["trainer.buffer"]


def test_modules_beside_the_model() -> None:
    """One that changes is saved from then on, in later attempts too; a frozen one is not. One that
    this script does not have is named."""
    before, after = (
        trainer(moving=torch.nn.Linear(2, 2), frozen=torch.nn.Linear(2, 2)) for _ in range(2)
    )
    saved, loaded = (OtherModules(functools.partial(other_modules, one)) for one in (before, after))
    saved.remember()
    assert saved.state_dict() == {}
    before.moving.weight.data.zero_()
    loaded.remember()
    loaded.load_state_dict(saved.state_dict())
    assert not after.moving.weight.any()
    assert after.frozen.weight.any()
    assert loaded.state_dict().keys() == {"moving"}
    with pytest.raises(StateMismatch, match="state of moving, which this script does not have"):
        OtherModules(lambda: other_modules(trainer())).load_state_dict(saved.state_dict())


@pytest.mark.parametrize(
    ("version", "model_init", "reason"),
    [(1, None, '"version": 2'), (2, object(), "FSDP and model_init"), (2, None, None)],
)
def test_which_fsdp_is_not_supported(version: int, model_init: Any, reason: str | None) -> None:
    """And what to do about it."""
    plugin = SimpleNamespace(fsdp_version=version)
    one = trainer(model_init=model_init, _prepare_for_training=None, is_fsdp_enabled=True)
    one.accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    assert is_sharded(one)
    found = why_not(one)
    assert (found is None) is (reason is None)
    assert (reason or "") in (found or "")


# --- a batch that was fetched ahead: saved as it is, or not at all
# ------------------------------------------------------------------------------------------------


class Named(UserDict):
    """With a name beside its items."""

    def __init__(self, items: Any, name: str = "none") -> None:
        super().__init__(items)
        self.name = name


@pytest.mark.parametrize("name", ["dict", "BatchEncoding", "Named"])
def test_batch_comes_back(name: str) -> None:
    """Class, order and kinds of the items, and the layout of a tensor, are what they were."""
    from transformers import BatchEncoding

    kind = {"dict": dict, "BatchEncoding": BatchEncoding, "Named": Named}[name]
    image = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    batch = kind({"ids": torch.arange(6).view(2, 3), "image": image, "words": ("a", "b"), "n": 2})
    assert is_saved(batch)
    found = unpacked(decode(*encode(packed(batch), prefix="batch")))
    assert type(found) is kind
    assert list(found) == list(batch)
    assert (found["words"], found["n"]) == (("a", "b"), 2)
    assert torch.equal(found["ids"], batch["ids"])
    assert torch.equal(found["image"], image)
    assert found["image"].stride() == image.stride()


@pytest.mark.parametrize(
    "batch",
    [
        {"meta": object()},
        Named({"ids": torch.zeros(1)}, name="another"),
        {"ids": torch.zeros(1, requires_grad=True)},
        {"ids": torch.zeros(1, device="meta")},
        type("Local", (UserDict,), {})({"ids": torch.zeros(1)}),
    ],
)
def test_what_would_come_back_otherwise_is_refused(batch: Any) -> None:
    """Such batches are fetched again, and so are very large ones."""
    assert not is_saved(torch.empty(MOST_BYTES + 1, dtype=torch.uint8))
    with pytest.raises(UnsavableState, match="batch"):
        packed(batch)
    assert not is_saved(batch)


@pytest.mark.parametrize("name", [["os", "_Environ"], ["no_module", "Thing"], ["os", "system"]])
def test_no_other_class_is_made(name: list[str]) -> None:
    """What a checkpoint names is not called, unless it is a dictionary of this kind."""
    with pytest.raises(StateMismatch, match="does not have"):
        unpacked({"batch": {}, "class": name})

"""A state that is walked again is encoded as one that is walked for the first time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint.states import same

from hydroslurm.checkpoint.outline import NoOutlineError, Outline
from hydroslurm.checkpoint.saver import Saver
from hydroslurm.checkpoint.store import CheckpointStore, State
from hydroslurm.checkpoint.tree import encode

Tree = dict[str, Any]


def _training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)
    )
    model[2].weight = model[0].weight
    return model, torch.optim.AdamW(model.parameters())


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Tree:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "several": ([torch.ones(2), "x", {}], {"turned": torch.randn(2, 3).t()}),
        "empty": torch.empty(0),
    }


def _outline(tree: Tree) -> Outline:
    return Outline(tree, encode(tree, prefix="shared")[0], prefix="shared")


def _as_encoded(outline: Outline, tree: Tree) -> bool:
    """Whether it was walked again; the result is right in any case."""
    found = outline.again(tree)
    if found is None:
        return False
    encoded, tensors = encode(tree, prefix="shared")
    assert found[0] == encoded
    assert len(found[1]) == len(tensors)
    for one, wanted in zip(found[1], tensors.values(), strict=True):
        assert (one.data_ptr(), one.shape, one.stride(), one.dtype) == (
            *(wanted.data_ptr(), wanted.shape, wanted.stride(), wanted.dtype),
        )
    return True


def test_steps_of_a_training() -> None:
    """New tensors and numbers in the old places are found; tied ones count once."""
    model, optimizer = _training()
    outline = _outline(_step(model, optimizer))
    for lr in (0.1, 1e-3):
        optimizer.param_groups[0]["lr"] = lr
        assert _as_encoded(outline, _step(model, optimizer))


def _change(path: str, value: Callable[[Any], Any]) -> Callable[[Tree], None]:
    """Replaces what is at a path."""

    def change(tree: Tree) -> None:
        *way, last = path.split("/")
        at: Any = tree
        for key in way:
            at = at[int(key) if isinstance(at, (list, tuple)) or int in set(map(type, at)) else key]
        last_key: Any = int(last) if isinstance(at, list) else last
        at[last_key] = value(at[last_key])

    return change


def _rename(tree: Tree) -> None:
    tree["model"]["0.weights"] = tree["model"].pop("0.weight")


def _true_for_one(tree: Tree) -> None:
    state = tree["optimizer"]["state"]
    tree["optimizer"]["state"] = {True if key == 1 else key: one for key, one in state.items()}


def _tie(tree: Tree) -> None:
    tree["model"]["1.bias"] = tree["model"]["1.weight"]


def _other_version(tree: Tree) -> None:
    tree["model"]._metadata[""]["version"] = 1.0


@pytest.mark.parametrize(
    "change",
    [
        _rename,
        _true_for_one,
        _tie,
        _other_version,
        _change("model/2.weight", torch.clone),
        _change("model/1.bias", torch.Tensor.double),
        _change("model/1.bias", lambda one: one[:4]),
        _change("model/1.bias", torch.nn.Parameter),
        _change("model/1.bias", lambda one: one.clone().requires_grad_()),
        _change("model/1.bias", lambda one: torch.stack([one, one], 1)[:, 0]),
        _change("model/1.bias", lambda one: torch.complex(one, one).conj().imag),
        _change("several/0/1", lambda _: torch.ones(1)),
        _change("several/0/1", lambda _: np.ones(1)),
        _change("several/0/2", lambda _: {"now": torch.ones(1)}),
        _change("several", list),
        _change("several", lambda one: (*one, 1)),
        _change("several/0/0", lambda _: 5),
        _change("model", dict),
        _change("optimizer/state/1/step", lambda _: None),
    ],
)
def test_what_looks_different(change: Callable[[Tree], None]) -> None:
    """Names, types, shapes, strides, ties, containers: any change has it walked anew."""
    tree = _step(*_training())
    outline = _outline(tree)
    assert _as_encoded(outline, tree)
    change(tree)
    assert not _as_encoded(outline, tree)


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"m": {"x": 1}},
        {"m": {"x": torch.nn.Parameter(torch.ones(2))}},
        {"m": {"x": torch.ones(2), "d": deque([torch.ones(1)])}},
        {"m": {"x": torch.ones(2), "n": np.ones(3)}},
        {"m": {"x": torch.ones(2, dtype=torch.complex64).conj()}},
    ],
    ids=["nothing", "no-tensor", "parameter", "deque", "numpy", "conj"],
)
def test_what_is_walked_each_time(tree: Tree) -> None:
    """Of what is not simply tensors in dicts and lists there is no outline."""
    with pytest.raises(NoOutlineError):
        _outline(tree)


def test_saves_after_the_first_have_the_values_of_their_step(tmp_path: Path) -> None:
    """What a saver keeps from save to save is nothing of the values: files with the same names,
    and what is loaded is the state of each step; also when tensors come and go in between."""
    saver = Saver(CheckpointStore(tmp_path), keep=9)
    model, optimizer = _training()
    states: dict[int, State] = {}
    for step in range(1, 5):
        tree = _step(model, optimizer)
        if step == 3:
            tree["model"]["one more"] = torch.randn(3)
        optimizer.param_groups[0]["lr"] = 1 / step
        own = {"noise": torch.randn(step if step == 4 else 2), "step": step}
        saver.start(State(tree, own), step=step)
        saver.wait()
        saver.poll()
        states[step] = CheckpointStore(tmp_path).load(CheckpointStore(tmp_path).committed()[-1])
        assert same(states[step].shared, tree)
        assert same(states[step].own, own)
    saver.close()

"""What is loaded is what was saved, in dtype, type and value; where it is not, it is said."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint.states import same
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader, TensorDataset
from training.loop import ask_for_stop

import hydroslurm
from hydroslurm.checkpoint import manifest
from hydroslurm.core.exitcodes import RUN_AGAIN
from hydroslurm.data import ResumableSampler
from hydroslurm.errors import StateMismatch
from hydroslurm.training.objects import Composition, Loading
from hydroslurm.training.readback import changes

# what torch's load_state_dict recasts to bfloat16, makes anew from a generator, or fails at
ODD: dict[str, Any] = {
    "momentum": lambda: torch.full((2,), 1.0001),
    "double": lambda: torch.ones(1, dtype=torch.float64),
    "index": lambda: torch.tensor([2**40 + 1]),
    "history": lambda: [torch.full((1,), 1.0001), {"best": torch.tensor([7])}],
    "window": lambda: deque([1.5, math.nan], maxlen=2),
    "name": lambda: "abc",
    "array": lambda: np.arange(3.0),
    "range": lambda: range(3),
    "ordered": lambda: OrderedDict(a=1),
    "count": lambda: 3,
}


@pytest.fixture(autouse=True)
def _news_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hydroslurm")


class Own(torch.optim.SGD):
    """An optimizer of a user's own, with state of every kind."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                for name, make in ODD.items():
                    self.state[param].setdefault(name, make())


class Looking(Own):
    """One that does something of its own when it is loaded, and leaves the rest to torch."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.was_loaded = True


class Expanded(nn.Module):
    """A layer, and a buffer that shows one value in many places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("scale", torch.full((1, 1), math.nan).expand(4, 2))

    def forward(self, x: Any) -> Any:
        return self.layer(x)


def run_of(directory: Path, **options: Any) -> hydroslurm.Run:
    return hydroslurm.Run(directory=directory, every_steps=0, **options)


def saved(run: hydroslurm.Run, model: nn.Module, optimizer: Any) -> None:
    """One step, and a save behind it; the process ends."""
    run.resume()
    x = torch.rand(4, 3, dtype=next(model.parameters()).dtype)
    model(x).float().square().sum().backward()
    optimizer.step()
    run.step += 1
    run.save()
    run.close()


def resumed(run: hydroslurm.Run) -> None:
    assert run.resume()
    run.close()


def saved_and_resumed(folder: Path, make: Any) -> list[tuple[nn.Module, Any]]:
    """Model and optimizer of both attempts; ``make`` gives them, and what else the run has."""
    made = []
    for attempt in (1, 2):
        model, optimizer, extra = make()
        run = run_of(folder, model=model, optimizer=optimizer, extra=extra)
        resumed(run) if attempt == 2 else saved(run, model, optimizer)
        made.append((model, optimizer))
    return made


@pytest.mark.parametrize("kind", [Own, Looking])
def test_the_state_of_an_optimizer_comes_back_as_it_was(
    kind: type[Own], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of bfloat16 weights, as float32, float64 and whole numbers, and in any container; also where
    torch's own load_state_dict fails."""

    def make() -> Any:
        model = nn.Linear(3, 2).bfloat16()
        return model, kind(model.parameters(), lr=0.1), {}

    _, (model, optimizer) = saved_and_resumed(tmp_path, make)
    for param in model.parameters():
        assert same(dict(optimizer.state[param]), {key: make() for key, make in ODD.items()})
    assert hasattr(optimizer, "was_loaded") == (kind is Looking)
    assert "is not what it was" not in caplog.text


def test_an_optimizer_that_is_saved_in_another_form_is_left_to_it(tmp_path: Path) -> None:
    """Somebody's hooks halve its momentum on the way out, and double it on the way in."""

    def scaled(state: Any, factor: float) -> Any:
        values = {
            number: {key: (value * factor).to(torch.float64) for key, value in one.items()}
            for number, one in state["state"].items()
        }
        return {**state, "state": values}

    def make() -> Any:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_state_dict_post_hook(lambda _, state: scaled(state, 0.5))
        optimizer.register_load_state_dict_pre_hook(lambda _, state: scaled(state, 2.0))
        return model, optimizer, {}

    made = saved_and_resumed(tmp_path, make)
    assert same(*(one.state[model.weight]["momentum_buffer"] for model, one in made))


class Forgetful:
    """Takes back less than it gives."""

    state: dict[str, Any]

    def __init__(self) -> None:
        noise, average = torch.rand(2), torch.ones(2, dtype=torch.float64)
        rest = {"window": deque([1], maxlen=2), "best": math.nan, "seen": [1, 2]}
        self.state = {"average": average, "noise": noise, **rest}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        average, noise = state["average"].float(), state["noise"] + 1
        rest = {"window": deque(state["window"]), "seen": state["seen"][:1]}
        self.state = {**state, "average": average, "noise": noise, **rest}


def test_what_an_object_does_not_take_back_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In one line, with the place of each item; what it has taken back is not in it."""

    def make() -> Any:
        model = nn.Linear(3, 2)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), {"memory": Forgetful()}

    saved_and_resumed(tmp_path, make)
    (line,) = (one for one in caplog.messages if "is not what it was" in one)
    assert "'memory' (Forgetful)" in line
    assert "memory.average was float64[2], is float32[2]; memory.noise has other values" in line
    assert "memory.window had maxlen=2, has maxlen=None (and 1 more)" in line


def test_expanded_buffers_and_lazy_layers_come_back(tmp_path: Path) -> None:
    """One value in many places is one again; a layer without weights gets those of the checkpoint;
    and a stop before there are any leaves as one to be started again, with nothing saved."""

    def make() -> Any:
        model = Expanded()
        model.layer = nn.LazyLinear(2)  # type: ignore[assignment]
        with torch.no_grad():
            model.scale[:1, :1].fill_(3.0 * (not list(tmp_path.glob("checkpoints/step-*"))))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), {}

    model, optimizer, _ = make()
    run = run_of(tmp_path, model=model, optimizer=optimizer)
    run.resume()
    ask_for_stop(run)
    with pytest.raises(SystemExit) as leaving:
        run.check_stop()
    assert leaving.value.code == RUN_AGAIN
    hydroslurm.uninstall()
    (first, optimizer), (second, again) = saved_and_resumed(tmp_path, make)
    assert torch.equal(first.layer.weight, second.layer.weight)
    assert torch.equal(second.scale, torch.full((4, 2), 3.0))
    assert second.scale.untyped_storage().nbytes() == 4
    momentum = optimizer.state[first.layer.weight]["momentum_buffer"]
    assert torch.equal(again.state[second.layer.weight]["momentum_buffer"], momentum)

    first = Expanded()
    first.register_buffer("scale", torch.rand(4, 2))
    saved(run_of(tmp_path / "other", model=first), first, torch.optim.SGD(first.parameters()))
    run = run_of(tmp_path / "other", model=Expanded())
    with pytest.raises(StateMismatch, match=r"model\.scale is one value in many places here"):
        run.resume()
    run.close()


class Thaw:
    """Adds a parameter group while training, and again when it is loaded."""

    def __init__(self, optimizer: torch.optim.Optimizer, late: nn.Module) -> None:
        self.optimizer, self.late, self.done = optimizer, late, False

    def thaw(self) -> None:
        self.done = True
        self.optimizer.add_param_group({"params": list(self.late.parameters()), "lr": 0.01})

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["done"]:
            self.thaw()


def test_extra_objects_rebuild_what_was_added_while_training(tmp_path: Path) -> None:
    """They are loaded before the optimizer; a script without one is told of them."""
    made: list[Thaw] = []

    def make() -> Any:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        made.append(Thaw(optimizer, model[1]))
        if len(made) == 1:
            made[0].thaw()
        return model, optimizer, {"thaw": made[-1]}

    _, (_, optimizer) = saved_and_resumed(tmp_path, make)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]
    assert len(optimizer.state) == 4
    model, optimizer, _ = make()
    run = run_of(tmp_path, model=model, optimizer=optimizer)
    with pytest.raises(StateMismatch, match=r"parameter groups.* in extra=, .* first"):
        run.resume()
    run.close()


class AdamW(torch.optim.AdamW):
    """The same under another roof."""


class Renamed(torch.optim.AdamW):
    """The same by another name."""


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "dtype", "refused", "said"),
    [
        (torch.optim.SGD, StepLR, torch.float32, r"was a torch\.optim\.adamw\.AdamW, and is a .*SGD"
         r": the checkpoint has .*betas.*, it wants dampening, momentum, nesterov", None),
        (torch.optim.AdamW, CosineAnnealingLR, torch.float32, r"'scheduler' was .*StepLR, and is "
         r".*CosineAnnealingLR: the checkpoint has gamma, step_size, it wants T_max", None),
        (torch.optim.AdamW, StepLR, torch.float64, r"'weight' is torch.float32 in the checkpoint "
         "and torch.float64 here", None),
        (Renamed, StepLR, torch.float32, None, "test_readback.Renamed; what was saved fits it"),
        (torch.optim.AdamW, None, torch.float32, None, "a state for scheduler, which this run"),
        (AdamW, StepLR, torch.float32, None, None),
    ],
    ids=["optimizer", "scheduler", "dtype", "renamed", "forgotten", "moved"],
)  # fmt: skip
def test_other_objects_are_refused_or_named(
    optimizer: Any,
    scheduler: Any,
    dtype: torch.dtype,
    refused: str | None,
    said: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What would train in another way, or fail at the first step, is not loaded; a new name is one
    line, a new module nothing."""
    model = nn.Linear(3, 2)
    adamw = torch.optim.AdamW(model.parameters())
    run = run_of(tmp_path, model=model, optimizer=adamw, scheduler=StepLR(adamw, 3))
    saved(run, model, adamw)
    model = nn.Linear(3, 2, dtype=dtype)
    before = model.weight.clone()
    other = optimizer(model.parameters())
    plan = None if scheduler is None else scheduler(other, 3)
    run = run_of(tmp_path, model=model, optimizer=other, scheduler=plan)
    if refused is None:
        resumed(run)
    else:
        with pytest.raises(StateMismatch, match=refused):
            run.resume()
        assert torch.equal(before, model.weight), "nothing was loaded"
        run.close()
    news = [one for one in caplog.messages if "new run" not in one and "resumes from" not in one]
    assert [said in one for one in news] == [True] if said else not news


@pytest.mark.parametrize("kind", ["within an epoch", "between epochs", "ResumableSampler"])
def test_another_batch_size(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where it would lose samples it is refused, with what does not; else it is one line."""
    seen: list[float] = []
    cut = kind != "between epochs"

    def attempt(batch_size: int, *, epochs: int = 1, length: int = 24, **options: Any) -> None:
        data = TensorDataset(torch.arange(float(length))[:, None])
        if kind == "ResumableSampler":
            options = {"sampler": ResumableSampler(data)}
        loader = DataLoader(data, batch_size, **options)
        with contextlib.closing(run_of(tmp_path, model=nn.Linear(1, 1), loader=loader)) as run:
            for number, (x,) in enumerate(run.batches(epochs=epochs), 1):
                seen.extend(x.flatten().tolist())
                if cut and (batch_size, number) == (4, 2):
                    run.save()
                    break

    attempt(4)
    if kind == "within an epoch":
        with pytest.raises(StateMismatch, match=r"size was 4, and is 6: .* epoch 0, behind b"):
            attempt(6)
        with pytest.raises(StateMismatch, match=r"data set was 24, and is 30; .*'RandomSampler'"):
            attempt(4, length=30, shuffle=True)
        return
    attempt(6, epochs=1 if cut else 2)
    assert sorted(seen) == sorted([*range(24)] * (1 if cut else 2))
    assert [one for one in caplog.messages if "batch_size was 4, and is 6: from here" in one]


def test_other_ranks_are_one_line() -> None:
    """Each with its share of the batch; whether the place in the data fits them the loader says."""
    was = Composition({}, Loading("RandomSampler", 8, 24)).to_meta()
    header = manifest.begun(step=5, epoch=0, kind="stop", meta=was)
    inside = {"begun": True, "finished": False, "strategy": "replay", "epoch": 0, "batches": 5}
    now = Loading("RandomSampler", 4, 24)
    (line,) = changes(header, now, world_size=2, data=inside)
    assert "step 5 was saved by 1 rank, and goes on with 2 ranks" in line
    _, line = changes(header, now, world_size=4, data=inside)
    assert "the batch of all ranks was 8, and is 16" in line
    nothing = manifest.begun(step=5, epoch=0, kind="stop", meta={})
    assert not list(changes(nothing, now, world_size=1, data=inside)), "written by an older release"

"""What the writer of an own loop forgets, word for word; and what only looks like it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.data import DataLoader, TensorDataset
from training.loop import ask_for_stop

import hydroslurm
from hydroslurm.checkpoint import rng
from hydroslurm.errors import StateMismatch, UnsavableState, UsageError
from hydroslurm.training.cursor import PerRank

ADAM = "Adam (of parameters of shape [1, 2], [1])"
SGD = "SGD (of parameters of shape [1, 3], [1])"


class Parts:
    """A model with all that belongs to it, and a second one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.second = nn.Linear(3, 1)
        self.second_optimizer = torch.optim.SGD(self.second.parameters(), lr=0.1)
        self.loader = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2)

    def run(self, folder: Path, **options: Any) -> hydroslurm.Run:
        given = {"model": self.model, "optimizer": self.optimizer, "every_steps": 0, **options}
        return hydroslurm.Run(directory=folder, **given)

    def loss(self, x: torch.Tensor | None = None) -> torch.Tensor:
        return self.model(torch.rand(4, 2) if x is None else x).square().mean()

    def learn(self, x: torch.Tensor | None = None) -> float:
        loss = self.loss(x)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def learn_both(self) -> None:
        self.learn()
        self.second(torch.rand(4, 3)).sum().backward()
        self.second_optimizer.step()

    def learn_with(self, tensor: torch.Tensor) -> Callable[[], Any]:
        self.optimizer.add_param_group({"params": [tensor]})
        return self.learn

    def endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader


def steps_of(
    run: hydroslurm.Run, body: Callable[[], Any], total: int = 2, *, over_batches: bool = False,
    **options: Any,
) -> None:  # fmt: skip
    for _ in run.batches(epochs=1) if over_batches else run.steps(total, **options):
        body()


def scheduled(parts: Parts, **extra: Any) -> Any:
    made = torch.optim.lr_scheduler.StepLR(parts.optimizer, 1)
    learn = parts.learn_both if extra else parts.learn
    return {"extra": extra}, lambda: (learn(), made.step())


def batches_of(parts: Parts, batches: Iterator[Any], **options: Any) -> Any:
    return options, lambda: parts.learn(next(batches)[0])


def scaled(parts: Parts) -> Any:
    made = torch.amp.GradScaler("cpu", init_scale=1024.0)
    learn = lambda: made.scale(parts.loss()).backward()  # noqa: E731
    return {"loader": parts.loader}, lambda: (learn(), made.step(parts.optimizer), made.update())


def iterator_of_its_own(parts: Parts) -> Any:
    """A generator that each step advances; one that only draws has no place."""
    numbers, drawn = (one for one in range(100)), (random.random() for _ in range(100))
    return {}, lambda: (parts.learn(), next(numbers), next(drawn))


FORGOTTEN: dict[str, Callable[[Parts], Any]] = {
    "optimizer": lambda parts: ({"optimizer": None}, parts.learn),
    "second optimizer": lambda parts: ({"extra": {"second": parts.second}}, parts.learn_both),
    "weights": lambda parts: ({"extra": {"other": parts.second_optimizer}}, parts.learn_both),
    "tensor": lambda parts: ({}, parts.learn_with(torch.zeros(1, requires_grad=True))),
    "scheduler": scheduled,
    "scheduler of one of two": lambda parts: scheduled(
        parts, m=parts.second, o=parts.second_optimizer,
        s=torch.optim.lr_scheduler.StepLR(parts.second_optimizer, 1),
    ),
    "iterator": lambda parts: batches_of(parts, iter(parts.loader)),
    "endless iterator": lambda parts: batches_of(parts, parts.endless(), loader=parts.loader),
    "scaler": scaled,
    "its own iterator": iterator_of_its_own,
}  # fmt: skip
"""Parts -> the options of a run, and the body of its loop."""
BATCH = "a batch was taken from an iterator over a DataLoader, which has no position that is saved"
HAND_OUT = "Let the run hand them out: Run(loader=loader) and `for batch in run.batches(epochs=...)"
MODULE = 'run.register("model_2", module) for each further one, torch.nn.ParameterList('


@pytest.mark.parametrize(
    ("forgotten", "said", "remedy"),
    [
        ("optimizer", f"{ADAM} has stepped and is not part of this run", "it: Run(optimizer=...)"),
        ("second optimizer", f"{SGD} has stepped", 'run.register("optimizer_2", optimizer) for'),
        ("weights", f"{SGD} trains 2 parameters that are not part of this run, the first", MODULE),
        ("tensor", "Adam", "trains 1 parameters that are not part of this run"),
        ("scheduler", f"a scheduler sets the learning rate of {ADAM}, and none", "Run(scheduler="),
        ("scheduler of one of two", f"a scheduler sets the learning rate of {ADAM}", "scheduler_2"),
        ("iterator", BATCH, HAND_OUT),
        ("endless iterator", BATCH, HAND_OUT),
        ("scaler", "a GradScaler (scale 1024) has scaled this step and is not part of this", ""),
        ("its own iterator", "body.numbers (generator) is an iterator that has moved", HAND_OUT),
    ],
)
def test_what_was_not_given(forgotten: str, said: str, remedy: str, tmp_path: Path) -> None:
    """The first step ends with it and with what to write; nothing was saved, and no hook stays."""
    parts = Parts()
    options, body = FORGOTTEN[forgotten](parts)
    run = parts.run(tmp_path, **options)
    hooks = len(_global_optimizer_post_hooks)
    following = torch.utils.data.dataloader._BaseDataLoaderIter.__next__
    over_batches = forgotten == "scaler"
    with pytest.raises(UsageError) as found, run:
        steps_of(run, body, over_batches=over_batches)
    assert str(found.value).startswith(said)
    assert remedy in str(found.value)
    assert ("run.batches(" if over_batches else "run.steps(total, check=F") in str(found.value)
    assert not list(run.dir.checkpoints.glob("step-*"))
    assert len(_global_optimizer_post_hooks) == hooks
    assert torch.utils.data.dataloader._BaseDataLoaderIter.__next__ is following


def test_what_has_grown(tmp_path: Path) -> None:
    """A save that no later attempt could load is refused when it is made; a stop keeps what is
    committed, and goes on from there."""
    parts = Parts()
    run = parts.run(tmp_path)
    steps_of(run, parts.learn, 2)
    parts.optimizer.add_param_group({"params": [parts.second.weight]})
    with pytest.raises(UnsavableState, match=r"when this attempt began \(\+ group 1\)"):
        run.save()
    ask_for_stop(run)
    with pytest.raises(SystemExit):
        steps_of(run, parts.learn, 4, check=False)
    assert [path.name for path in run.dir.checkpoints.glob("step-*")] == ["step-000000002"]


def test_an_optimizer_that_is_made_on_the_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first save behind its first step names it: no later attempt would have its state."""
    parts = Parts()
    run = parts.run(tmp_path)
    for step in run.steps(4):
        if step == 2:
            late = torch.optim.SGD(parts.model.parameters(), lr=0.1, momentum=0.9)
            parts.optimizer = late
        parts.learn()
        run.save()
        named = "parts.optimizer (SGD) has stepped and is not part of this run" in caplog.text
        assert named == (step >= 2), caplog.text
    run.close()


def test_what_is_no_mistake(tmp_path: Path) -> None:
    """An evaluation over a loader, whole or cut short; one object that saves all; schedulers in a
    chain; a plain optimizer in another object; and what the script answers for itself."""
    parts = Parts()

    class Agent:
        def state_dict(self) -> dict[str, Any]:
            things = (parts.second, parts.second_optimizer, scheduler)
            return {"all": [one.state_dict() for one in things]}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    lr = torch.optim.lr_scheduler
    scheduler = lr.StepLR(parts.second_optimizer, 1)
    chain = lr.SequentialLR(
        parts.optimizer, [lr.StepLR(parts.optimizer, 1), lr.StepLR(parts.optimizer, 2)], [1]
    )

    scaler = torch.amp.GradScaler("cpu")

    def body() -> None:
        parts.learn_both()
        scaler.scale(parts.loss()).backward()
        scaler.step(parts.optimizer)
        scaler.update()
        scheduler.step()
        for (x,) in parts.loader:
            parts.model(x)
        with torch.no_grad():
            for (x,) in parts.loader:
                if parts.model(x).isfinite().all():
                    break

    run = parts.run(tmp_path / "a", extra={"agent": Agent(), "chain": chain, "scaler": scaler})
    steps_of(run, body)
    run.close()
    parts = Parts()
    run = parts.run(tmp_path / "b", optimizer=None)
    steps_of(run, parts.learn_both, check=False)
    assert run.step == 2
    run.close()


def test_what_cannot_be_registered(tmp_path: Path) -> None:
    """Without a state, under a name twice, too late: said where it is registered."""
    run = Parts().run(tmp_path)
    run.register("noise", torch.Generator())
    for name, thing, said in (
        ("thing", 3, "'thing' is a int without state_dict() and load_state_dict(); only objects "),
        ("thing", iter([1]), "'thing' is a list_iterator, which has no position that can be saved"),
        ("thing", random.SystemRandom(), "'thing' is a SystemRandom, which draws from the operati"),
        ("noise", nn.Linear(1, 1), "'noise' is already registered"),
    ):
        with pytest.raises(UsageError, match=re.escape(said)):
            run.register(name, thing)
    for _ in run.steps(1):
        with pytest.raises(UsageError, match="comes too late: the run has been resumed already"):
            run.register("more", torch.Generator())
    run.close()


def test_a_loop_in_a_loop(tmp_path: Path) -> None:
    """Both would count."""
    run = Parts().run(tmp_path)
    for _ in run.steps(1):
        with pytest.raises(
            UsageError, match=r"in the body of a loop over .* Make one loop, or one"
        ):
            next(run.steps(3))
    run.close()


def test_a_checkpoint_without_what_is_registered_now(tmp_path: Path) -> None:
    """Or with another kind of generator under its name: it is not resumed from."""
    parts = Parts()
    first = parts.run(tmp_path)
    first.register("noise", random.Random(1))
    steps_of(first, parts.learn)
    first.close()
    for name, thing, said in (
        ("wind", random.Random(1), "no state of this rank for wind; it has noise"),
        ("noise", torch.Generator(), "state of 'noise' does not fit a Generator"),
    ):
        again = Parts().run(tmp_path)
        again.register(name, thing)
        with pytest.raises(StateMismatch, match=said):
            again.resume()
        again.close()


def test_a_step_that_was_left_counts(tmp_path: Path) -> None:
    """``break`` behind what a step does, as nanoGPT ends: it is saved as trained, and a restart has
    nothing to do."""
    parts = Parts()
    run = parts.run(tmp_path)
    for step in run.steps(5):
        parts.learn()
        if step == 2:
            break
    run.finish()
    assert [path.name for path in run.dir.checkpoints.glob("step-*")] == ["step-000000003"]
    assert run.step == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.Generator().manual_seed(1),
        lambda: random.Random(1),
        lambda: numpy.random.default_rng(1),
        lambda: numpy.random.RandomState(1),
        lambda: numpy.random.Generator(numpy.random.SFC64(1)),
    ],
)
def test_a_new_rank_draws_its_own_numbers(make: Callable[[], Any]) -> None:
    """From the state of rank 0: the same each time, and another stream for each rank."""
    one = make()
    saved = PerRank()
    saved.add("one", one)
    states = saved.states()
    drawn = []
    for rank in (None, 1, 1, 2):
        own = PerRank()
        other = make()
        own.add("one", other)
        own.load(states)
        own.rewind(states, new_rank=rank)
        drawn.append(str(rng.state_of(other)))
    assert drawn[0] == str(rng.state_of(one))
    assert drawn[1] == drawn[2]
    assert len(set(drawn)) == 3

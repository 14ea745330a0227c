"""What the writer of an own loop forgets, word for word; and what only looks like it."""

from __future__ import annotations

import random
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

OTHERWISE = " If what you register saves it in another form: run.steps(total, check=False)"
ADAM = "Adam (of parameters of shape [1, 2], [1])"


class Parts:
    """A model with all that belongs to it, and a second one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.second = nn.Linear(3, 1)
        self.second_optimizer = torch.optim.SGD(self.second.parameters(), lr=0.1)
        self.loader = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2)

    def run(self, folder: Path, *names: str, **options: Any) -> hydroslurm.Run:
        given = {name: getattr(self, name) for name in names or ("model", "optimizer")}
        return hydroslurm.Run(directory=folder, every_steps=0, **given, **options)

    def learn(self, x: torch.Tensor | None = None) -> float:
        loss = self.model(torch.rand(4, 2) if x is None else x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def learn_both(self) -> None:
        self.learn()
        self.second(torch.rand(4, 3)).sum().backward()
        self.second_optimizer.step()


def steps_of(run: hydroslurm.Run, body: Callable[[], Any], total: int = 2, **options: Any) -> None:
    for _ in run.steps(total, **options):
        body()


def first_mistake(run: hydroslurm.Run, body: Callable[[], Any]) -> str:
    """What the first step ends with; nothing was saved, and no hook has stayed."""
    hooks = len(_global_optimizer_post_hooks)
    following = torch.utils.data.dataloader._BaseDataLoaderIter.__next__
    with pytest.raises(UsageError) as found, run:
        steps_of(run, body)
    assert not list(run.dir.checkpoints.glob("step-*"))
    assert len(_global_optimizer_post_hooks) == hooks
    assert torch.utils.data.dataloader._BaseDataLoaderIter.__next__ is following
    return str(found.value)


def test_an_optimizer_that_was_not_given(tmp_path: Path) -> None:
    """The only one, or the second; one without a state of its own, too."""
    parts = Parts()
    assert first_mistake(parts.run(tmp_path / "a", "model"), parts.learn) == (
        f"{ADAM} has stepped and is not part of this run: resumed, it would begin anew. Give it: "
        'Run(optimizer=...) for one, run.register("optimizer_2", optimizer) for each further one.'
        + OTHERWISE
    )
    parts = Parts()
    run = parts.run(tmp_path / "b", extra={"second": parts.second})
    assert first_mistake(run, parts.learn_both).startswith(
        "SGD (of parameters of shape [1, 3], [1]) has stepped and is not part of this run"
    )


def test_weights_that_were_not_given(tmp_path: Path) -> None:
    """A module, or a tensor that is in none."""
    parts = Parts()
    extra = {"second_optimizer": parts.second_optimizer}
    assert first_mistake(parts.run(tmp_path / "a", extra=extra), parts.learn_both) == (
        "SGD (of parameters of shape [1, 3], [1]) trains 2 parameters that are not part of this "
        "run, the first of shape [1, 3]: resumed, they would begin anew. Give the module that has "
        'them: Run(model=...) for one, run.register("model_2", module) for each further one, '
        "torch.nn.ParameterList([tensor]) for a tensor that belongs to none." + OTHERWISE
    )
    parts = Parts()
    parts.optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    assert "trains 1 parameters" in first_mistake(parts.run(tmp_path / "b"), parts.learn)


def test_a_scheduler_that_was_not_given(tmp_path: Path) -> None:
    """Of one optimizer; that of another one does not count."""
    parts = Parts()
    scheduler = torch.optim.lr_scheduler.StepLR(parts.optimizer, 1)
    run = parts.run(tmp_path / "a")
    assert first_mistake(run, lambda: (parts.learn(), scheduler.step())) == (
        f"a scheduler sets the learning rate of {ADAM}, and none is part of this run: resumed, it "
        'would begin anew. Give it: Run(scheduler=...) for one, run.register("scheduler_2", '
        "scheduler) for each further one." + OTHERWISE
    )
    parts = Parts()
    scheduler = torch.optim.lr_scheduler.StepLR(parts.optimizer, 1)
    other = torch.optim.lr_scheduler.StepLR(parts.second_optimizer, 1)
    extra = {"m": parts.second, "o": parts.second_optimizer, "s": other}
    run = parts.run(tmp_path / "b", extra=extra)
    assert ADAM in first_mistake(run, parts.learn_both)


@pytest.mark.parametrize("where", ["before the loop", "in the first step", "given to the run"])
def test_an_iterator_without_a_position(where: str, tmp_path: Path) -> None:
    """Over a DataLoader, whoever made it."""
    parts = Parts()
    options = {"loader": parts.loader} if where == "given to the run" else {}
    run = parts.run(tmp_path, **options)

    def endless() -> Iterator[Any]:
        while True:
            yield from parts.loader

    batches = endless() if where == "in the first step" else iter(parts.loader)
    assert first_mistake(run, lambda: parts.learn(next(batches)[0])) == (
        "a batch was taken from an iterator over a DataLoader, which has no position that is "
        "saved: resumed, it would begin with its first batches again. Let the run hand them out: "
        "Run(loader=loader) and `for batch in run.batches(epochs=...)`; or have a get_batch(step) "
        "choose the samples by the number of the step. If the script skips what was read already: "
        "run.steps(total, check=False)"
    )


@pytest.mark.parametrize("loop", ["steps", "batches"])
def test_a_scaler_that_was_not_given(loop: str, tmp_path: Path) -> None:
    """And not once it is registered."""
    for is_registered in (False, True):
        parts, found = Parts(), ""
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        run = parts.run(tmp_path / str(is_registered), "model", "optimizer", "loader")
        if is_registered:
            run.register("scaler", scaler)
        try:
            for _ in run.steps(1) if loop == "steps" else run.batches(epochs=1):
                scaler.scale(parts.model(torch.ones(4, 2)).sum()).backward()
                scaler.step(parts.optimizer)
                scaler.update()
        except UsageError as error:
            found = str(error)
        run.close()
        said = "a GradScaler (scale 1024) has scaled this step and is not part of this run"
        assert found.startswith("" if is_registered else said)
        assert (f"run.{loop}(" in found) is not is_registered


@pytest.mark.parametrize("loop", ["steps", "batches"])
def test_an_iterator_of_the_scripts_own(loop: str, tmp_path: Path) -> None:
    """A generator that each step advances; one that only draws has no place."""
    parts = Parts()

    def windows() -> Iterator[int]:
        yield from range(100)

    def noise() -> Iterator[float]:
        while True:
            yield random.random()

    run = parts.run(tmp_path, "model", "optimizer", "loader")
    numbers, drawn = windows(), noise()
    next(drawn)

    def train() -> None:
        for _ in run.steps(2) if loop == "steps" else run.batches(epochs=1):
            parts.learn()
            next(numbers), next(drawn)

    with pytest.raises(UsageError) as found:
        train()
    run.close()
    assert str(found.value).startswith(
        "numbers (generator) is an iterator that has moved, and nothing can bring it back to its "
        "place. Let the run hand them out: "
    )
    assert f"run.{loop}(" in str(found.value)


def test_what_has_grown(tmp_path: Path) -> None:
    """A save that no later attempt could load is refused when it is made; a stop keeps what is
    committed, and goes on from there."""
    for change, said in (
        (
            lambda parts: parts.model.register_parameter("more", nn.Parameter(torch.ones(1))),
            "+ more",
        ),
        (
            lambda parts: parts.optimizer.add_param_group({"params": [parts.second.weight]}),
            "+ group 1",
        ),
    ):
        parts = Parts()
        run = parts.run(tmp_path / said, "model", "optimizer")
        steps_of(run, parts.learn, 2)
        change(parts)
        with pytest.raises(UnsavableState) as found:
            run.save()
        assert f"is not what the script has made when this attempt began ({said})" in str(
            found.value
        )
        ask_for_stop(run)
        with pytest.raises(SystemExit):
            steps_of(run, parts.learn, 4, check=False)
        assert [path.name for path in run.dir.checkpoints.glob("step-*")] == ["step-000000002"]
        hydroslurm.uninstall()


def test_an_optimizer_that_is_made_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is named at the next save, once."""
    parts = Parts()
    run = parts.run(tmp_path, "model", "optimizer")
    for step in run.steps(4):
        parts.learn()
        if step == 1:
            later = torch.optim.Adam(parts.model.parameters())
        if step > 1:
            parts.model(torch.rand(4, 2)).sum().backward()
            later.step()
            run.save()
    run.close()
    (said,) = [one for one in caplog.messages if "has stepped" in one]
    assert said.startswith(
        "later (Adam) has stepped and is not part of this run: resumed, it would"
    )


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

    def body() -> None:
        parts.learn_both()
        scheduler.step()
        for (x,) in parts.loader:
            parts.model(x)
        with torch.no_grad():
            for (x,) in parts.loader:
                if parts.model(x).isfinite().all():
                    break

    run = parts.run(tmp_path / "a", extra={"agent": Agent(), "chain": chain})
    steps_of(run, body)
    run.close()
    parts = Parts()
    run = parts.run(tmp_path / "b", "model")
    steps_of(run, parts.learn_both, check=False)
    assert run.step == 2
    run.close()


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        (
            3,
            "'thing' is a int without state_dict() and load_state_dict(); only objects that have "
            "both can be saved. Wrap it in one that does",
        ),
        (
            iter([1]),
            "'thing' is a list_iterator, which has no position that can be saved. Let the run hand "
            "out its batches: Run(loader=loader) and `for batch in run.batches(epochs=...)`; or "
            "have a get_batch(step) choose the samples by the number of the step",
        ),
        (
            random.SystemRandom(),
            "'thing' is a SystemRandom, which draws from the operating system and has no state to "
            "resume from; use random.Random(seed)",
        ),
    ],
)
def test_what_has_no_state(thing: Any, said: str, tmp_path: Path) -> None:
    """Said where it is registered."""
    run = Parts().run(tmp_path)
    with pytest.raises(UsageError) as found:
        run.register("thing", thing)
    assert str(found.value) == said
    run.close()


def test_registered_too_late_or_twice(tmp_path: Path) -> None:
    """A generator's name is a name like another."""
    run = Parts().run(tmp_path)
    run.register("noise", torch.Generator())
    with pytest.raises(UsageError, match="'noise' is already registered"):
        run.register("noise", nn.Linear(1, 1))
    for _ in run.steps(1):
        with pytest.raises(UsageError, match="comes too late: the run has been resumed already"):
            run.register("more", torch.Generator())
    run.close()


def test_a_loop_in_a_loop(tmp_path: Path) -> None:
    """Both would count."""
    run = Parts().run(tmp_path)
    for _ in run.steps(1):
        with pytest.raises(UsageError) as found:
            next(run.steps(3))
    assert str(found.value) == (
        "run.steps() in the body of a loop over run.batches() or run.steps(): both would count the "
        "same steps. Make one loop, or one behind the other"
    )
    with pytest.raises(UsageError, match=r"steps\(-1\): wanted the number of steps, an int of 0"):
        next(run.steps(-1))
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


def stopped_at(folder: Path, stop: int | None, losses: list[float]) -> None:
    """Two loops, one behind the other, with draws between them."""
    parts = Parts()
    with parts.run(folder) as run:
        for total in (2, 4):
            for step in run.steps(total):
                losses.append(parts.learn())
                if step == stop:
                    ask_for_stop(run)
            losses.append(float(torch.rand(1)))


@pytest.mark.parametrize("stop", range(4))
def test_two_loops(stop: int, tmp_path: Path) -> None:
    """A resume in the second one, or right between them, goes on with the same random numbers."""
    alone: list[float] = []
    stopped_at(tmp_path / "alone", None, alone)
    stopped: list[float] = []
    with pytest.raises(SystemExit):
        stopped_at(tmp_path / "run", stop, stopped)
    hydroslurm.uninstall()
    again: list[float] = []
    stopped_at(tmp_path / "run", None, again)
    rest = alone[-len(again) :] if stop < 2 else alone[-(len(again) - 1) :]
    assert again[-len(rest) :] == rest
    assert stopped == alone[: len(stopped)]


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

"""BaseOpHook, ExecutionOpHook and their registration."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import nn

from hydroslurm import BaseOpHook, ExecutionOpHook, nvtx_mark, register_ophooks_recursively


class Recorder(BaseOpHook):
    """Writes down what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _note(self, call: str, module: nn.Module) -> None:
        self.calls.append(f"{call} {type(module).__name__}")

    pre_fwd_exec = partialmethod(_note, "pre_fwd")  # type: ignore[assignment]
    post_fwd_exec = partialmethod(_note, "post_fwd")  # type: ignore[assignment]
    pre_bwd_exec = partialmethod(_note, "pre_bwd")  # type: ignore[assignment]
    post_bwd_exec = partialmethod(_note, "post_bwd")  # type: ignore[assignment]


class Published(ExecutionOpHook):
    """A trace with the arguments that HydroJobSche hands out."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def pre_fwd_exec(self, module: nn.Module, *args: Any) -> None:
        self.sleep_while_paused()
        print(f"FWD PRE {module.__class__.__name__}")
        self.shapes += [tuple(one.shape) for (one,) in args]

    def pre_bwd_exec(self, module: nn.Module, input: Any, output: Any) -> None:
        self.sleep_while_paused()
        self.shapes += [tuple(input[0].shape), tuple(output.shape)]

    def post_bwd_exec(self, module: nn.Module, input: Any) -> None:
        self.shapes += [tuple(input[0].shape)]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 1))
    )


def test_the_four_calls_come_in_order_on_leaves_with_parameters() -> None:
    """Forward in order, backward in reverse; ReLU and the containers have no hooks. The gradients
    have the same bits as without, in-place ReLU behind a hooked layer works, and nothing keeps the
    model alive once the user lets go of it."""
    plain, model, recorder = _model(), _model(), Recorder()
    register_ophooks_recursively(model, [recorder])
    for one in (plain, model):
        one(torch.ones(2, 4)).sum().backward()
    layers = ("Linear", "LayerNorm", "Linear")
    forward = [f"{when}_fwd {layer}" for layer in layers for when in ("pre", "post")]
    assert recorder.calls == [
        *forward,
        "pre_bwd Linear",
        "pre_bwd LayerNorm",
        "post_bwd Linear",
        "post_bwd LayerNorm",
        "pre_bwd Linear",
    ]
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
    dead, output = weakref.ref(next(model.children())), model(torch.ones(2, 4))
    del model, one, b, output
    gc.collect()
    assert dead() is None


def test_the_arguments_of_hydrojobsche(capsys: pytest.CaptureFixture[str]) -> None:
    """Inputs and outputs come with the calls that want them; its trace and its mark work here;
    it keeps no model alive."""
    model, hook = _model(), Published()
    register_ophooks_recursively(model, [hook])
    model(torch.ones(2, 4)).sum().backward()
    nvtx_mark("no profiler, no GPU")
    said = capsys.readouterr().out.split("\n")
    assert said == ["FWD PRE Linear", "FWD PRE LayerNorm", "FWD PRE Linear", ""]
    wide, narrow = (2, 4), (2, 1)
    forward, last, norm, first = [wide] * 3, [wide, narrow], [wide] * 2, [wide] * 2
    assert hook.shapes == [*forward, *last, *norm, wide, wide, *first]
    dead, output = weakref.ref(next(model.children())), model(torch.ones(2, 4))
    del model, output
    gc.collect()
    assert dead() is None


def test_remove_leaves_nothing() -> None:
    """After close() no call comes any more, from a graph that was built before neither."""
    model, recorder = _model(), Recorder()
    handles = register_ophooks_recursively(model, [recorder])
    output = model(torch.ones(2, 4))
    handles.close()
    handles.close()
    recorder.calls.clear()
    output.sum().backward()
    model(torch.ones(2, 4)).sum().backward()
    assert recorder.calls == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_global_hooks_see_modules_made_later() -> None:
    """Without a model every module is seen, and removal is complete."""
    recorder = Recorder()
    handles = register_ophooks_recursively(None, [recorder])
    nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    handles.close()
    nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    assert recorder.calls == ["pre_fwd Linear", "post_fwd Linear", "pre_bwd Linear"]


def test_a_retained_graph_does_not_collect_hooks() -> None:
    """A node that outlives its step gets one hook per module, not one more at each forward."""
    first, second, recorder = nn.Linear(2, 2), nn.Linear(2, 2), Recorder()
    register_ophooks_recursively(second, [recorder])
    kept = first(torch.ones(1, 2))
    for _ in range(5):
        output = second(kept)
    recorder.calls.clear()
    output.sum().backward()
    assert recorder.calls.count("post_bwd Linear") == 1


def test_execution_hook_holds() -> None:
    """pause() or state = 0 holds a thread at its next module, resume() or state = 1 lets it go."""
    hook, model, steps = ExecutionOpHook(), _model(), list[torch.Tensor]()
    register_ophooks_recursively(model, [hook])
    reached = threading.Event()
    model.register_forward_pre_hook(lambda *_: reached.set())
    ways = (hook.pause, hook.resume), (lambda: _set(hook, 0), lambda: _set(hook, 1))
    for n, (pause, resume) in enumerate(ways):
        pause()
        pause()
        assert (hook.state, hook.pauses) == (0, 1)
        reached.clear()
        thread = threading.Thread(target=lambda: steps.append(model(torch.ones(2, 4))))
        thread.start()
        assert reached.wait(30)
        thread.join(0.05)
        assert len(steps) == n
        resume()
        thread.join(30)
        assert len(steps) == n + 1


def _set(hook: ExecutionOpHook, state: int) -> None:
    hook.state = state

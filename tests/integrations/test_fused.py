"""Modules and optimizers in PyTorch's fused forms: equal, faster, and otherwise left alone."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from integrations import fused_models as models
from torch import nn

import hydroslurm
from hydroslurm.errors import UsageError
from hydroslurm.integrations.fused import modules, rewriters, trial
from hydroslurm.integrations.fused.modules import Choice

WIDTH, LENGTH = 32, 24


@pytest.fixture(autouse=True)
def _own_rewriters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hydroslurm.optimize_modules  # with it come those of hydroslurm
    monkeypatch.setattr(rewriters, "_rewriters", list(rewriters._rewriters))
    torch.manual_seed(0)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is equal is taken, however fast it is on this machine just now."""
    set_speed(monkeypatch, 2.0)


def set_speed(monkeypatch: pytest.MonkeyPatch, ratio: float) -> None:
    for module in (trial, modules):
        monkeypatch.setattr(module, "time_ratio", lambda *_: ratio)


class Holder(nn.Module):
    """A model around one module, with a weight before it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = inner

    def forward(self, x: torch.Tensor, **named: Any) -> Any:
        return self.inner(self.before(x), **named)


def batch() -> torch.Tensor:
    return torch.randn(2, LENGTH, WIDTH)


def row_of(inner: nn.Module, **named: Any) -> Choice:
    """What becomes of a module."""
    rows = hydroslurm.optimize_modules(Holder(inner), {"x": batch(), **named})
    return next(row for row in rows if row.names == ("inner",))


@pytest.mark.parametrize(
    ("inner", "name"),
    [
        (models.RMSNorm(WIDTH, eps=1e-3), "rms_norm(0.001)"),
        (models.LlamaNorm(WIDTH), "rms_norm(1e-05)"),
        (models.GemmaNorm(WIDTH), "rms_norm(1e-06, 1 + weight)"),
        (models.LayerNorm(WIDTH), "F.layer_norm(1e-05)"),
        (models.NewGELU(), "F.gelu(approximate='tanh')"),
        (models.GELU(), "F.gelu"),
        (models.Swish(), "F.silu"),
        (models.Attention(WIDTH, 4, LENGTH), "F.scaled_dot_product_attention"),
        (models.LlamaAttention(WIDTH, 4, LENGTH), "F.scaled_dot_product_attention"),
        (models.ApartAttention(WIDTH, 4, LENGTH), "F.scaled_dot_product_attention(mask hidden)"),
        (models.HeadsAttention(WIDTH, 4, LENGTH), "attention(mask added, by heads)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_is_equal_is_found(always: None, inner: nn.Module, name: str) -> None:
    """The right formula with the right eps, by outputs and gradients."""
    row = row_of(inner)
    assert row.applied, row
    assert name in row.replacement
    assert row.difference is not None
    assert row.difference < 1e-5


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        (models.UnbiasedNorm(WIDTH), "is equal"),
        (models.Attention(WIDTH, 4, LENGTH, dropout=0.1), "draws other random numbers"),
        (models.KeptAttention(WIDTH, 4, LENGTH), "other parts"),
        (models.WindowAttention(WIDTH, 4, LENGTH), "known ways"),
        (models.CountingAttention(WIDTH, 4, LENGTH), "sets attributes"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_is_not_equal_is_left_alone(always: None, inner: nn.Module, reason: str) -> None:
    """And the row says why."""
    row = row_of(inner)
    assert not row.applied
    assert reason in row.reason or "another result" in row.reason
    assert "forward" not in vars(inner)


def eager_attention_forward() -> None:
    """As in transformers, where a name in the forward says that there is a fused one as well."""


class OfTransformers(models.KeptAttention):
    config = SimpleNamespace(_attn_implementation="eager")

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) if eager_attention_forward else None


def test_what_its_caller_can_have_fused() -> None:
    """Where the weights of an attention are returned, the row says how to do without them."""
    for inner, reason in (
        (nn.MultiheadAttention(WIDTH, 4), "fused where it is called with need_weights=False"),
        (OfTransformers(WIDTH, 4, LENGTH), "model.set_attn_implementation('sdpa') is fused"),
    ):
        (row,) = hydroslurm.optimize_modules(nn.ModuleList([inner]))
        assert row.reason.endswith(reason)


def test_a_hook_inside_an_attention_keeps_being_called(always: None) -> None:
    """Its softmax and its dropout are not called any more where they are fused."""
    inner = models.Attention(WIDTH, 4, LENGTH)
    inner.attn_dropout.register_forward_hook(lambda *_: None)
    assert "has hooks" in row_of(inner).reason


def test_a_mask_that_is_given(always: None) -> None:
    """Compared with the mask; without one, the module's own forward is used."""
    inner = models.LlamaAttention(WIDTH, 4, LENGTH).eval()
    mask = torch.zeros(LENGTH, LENGTH).masked_fill(torch.ones(LENGTH, LENGTH).triu(1) > 0, -1e9)
    assert row_of(inner, mask=mask).applied
    own, x = type(inner).forward, batch()
    torch.testing.assert_close(inner(x, mask=mask), own(inner, x, mask=mask))
    assert not torch.equal(inner(x, mask=mask), own(inner, x, mask=mask))
    assert torch.equal(inner(x), own(inner, x))


def test_the_model_is_the_same_but_for_its_forwards(always: None) -> None:
    """Keys, weights, hooks, classes and mode; a copy is fused, and a pickle is as it was."""
    model, tokens = models.GPT(), torch.randint(65, (2, 33))
    given = tokens[:, :-1], tokens[:, 1:]
    seen: list[str] = []
    model.norm.register_forward_hook(lambda *_: seen.append("norm"))
    model.blocks[0].eval()
    weights = {name: (id(one), one.clone()) for name, one in model.named_parameters()}
    shown, keys = repr(model), list(model.state_dict())
    rng = torch.get_rng_state()

    table = hydroslurm.optimize_modules(model, given)

    assert torch.equal(torch.get_rng_state(), rng)
    assert [len(row.names) for row in table.applied] == [5, 2, 2]
    assert "blocks.*.norm_1, ... x5 (RMSNorm)" in str(table)
    assert (repr(model), list(model.state_dict())) == (shown, keys)
    for name, one in model.named_parameters():
        assert id(one) == weights[name][0]
        assert torch.equal(one, weights[name][1])
        assert one.grad is None
    assert isinstance(model.norm, models.RMSNorm)
    assert [block.training for block in model.blocks] == [False, True]
    seen.clear()
    loss = model(*given)
    assert seen == ["norm"]
    copied, read = copy.deepcopy(model), pickle.loads(pickle.dumps(_without_hooks(model)))
    assert copied.norm.forward.__self__ is copied.norm
    assert copied.norm.forward.fused.name == model.norm.forward.fused.name
    assert read.norm.forward.__func__ is models.RMSNorm.forward
    for again in (copied, read):
        assert type(again.norm) is models.RMSNorm
        torch.manual_seed(1)
        own = again(*given)
        torch.manual_seed(1)
        torch.testing.assert_close(own, model(*given))
    assert loss.requires_grad
    assert not hydroslurm.optimize_modules(model, given).rows  # nothing is left to replace


def _without_hooks(model: nn.Module) -> nn.Module:
    model.norm._forward_hooks.clear()
    return model


def test_a_setting_that_is_changed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """And another type: both go to the module's own forward."""
    counted = itertools.count(2)
    monkeypatch.setattr(trial, "time_ratio", lambda *_: float(next(counted)))  # the last one wins

    @hydroslurm.register_rewriter(models.RMSNorm)
    def by_division(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt())

    inner = models.RMSNorm(WIDTH)
    assert row_of(inner).applied
    own, x = type(inner).forward, batch()
    for change in (functools.partial(setattr, inner, "eps", 0.5), inner.double):
        assert not torch.equal(inner(x), own(inner, x))
        change()
        x = x.to(inner.weight.dtype)
        assert torch.equal(inner(x), own(inner, x))
        inner.eps = 1e-6


@pytest.mark.parametrize("autocast", [True, False])
def test_in_bfloat16(always: None, autocast: bool) -> None:
    """The same modules are equal to what is fused, to the precision that they have."""
    model, tokens = models.GPT(), torch.randint(65, (2, 33))
    if not autocast:
        model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        table = hydroslurm.optimize_modules(model, (tokens[:, :-1], tokens[:, 1:]))
        assert [len(row.names) for row in table.applied] == [5, 2, 2], str(table)


def test_speed_is_measured() -> None:
    """A forward that does far more is found to be slower, and is left alone; what is not equal is
    not timed."""
    assert row_of(models.UnbiasedNorm(WIDTH)).speedup is None

    @hydroslurm.register_rewriter(models.Swish, name="slow")
    def often(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return sum(F.silu(x) for _ in range(40)) / 40

    rewriters._rewriters[:] = rewriters._rewriters[-1:]
    inner = models.Swish()
    row = row_of(inner)
    assert (row.applied, row.replacement, row.reason) == (False, "slow", "not faster")
    assert row.speedup is not None
    assert row.speedup < 0.9
    assert "forward" not in vars(inner)


def test_own_classes_are_registered(always: None) -> None:
    """A right one takes its place, a wrong one does not; classes made from it are of its kind."""

    @hydroslurm.register_rewriter(models.UnbiasedNorm, name="by var_mean")
    def by_var_mean(self: Any, x: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(x, -1, keepdim=True)
        return self.gamma * (x - mean) / (variance.sqrt() + 1e-6) + self.beta

    @hydroslurm.register_rewriter(lambda module: isinstance(module, models.GELU))
    def wrong(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x)

    rewriters._rewriters[:] = rewriters._rewriters[-2:]
    assert row_of(models.UnbiasedNorm(WIDTH)).replacement == "by var_mean"
    assert row_of(type("OfItsKind", (models.UnbiasedNorm,), {})(WIDTH)).applied
    assert "another result" in row_of(models.GELU()).reason
    with pytest.raises(UsageError, match="wanted a class of"):
        hydroslurm.register_rewriter(dict)  # type: ignore[arg-type]


def test_the_next_attempt_chooses_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was found to be faster stays, and what was not stays out, whatever the clock says: kept
    in the run's folder, by each rank for itself."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    for first, then in ((2.0, 0.5), (0.5, 2.0)):
        set_speed(monkeypatch, first)
        monkeypatch.setenv("HYDROSLURM_RUN_DIR", str(tmp_path / str(first)))
        chosen = hydroslurm.optimize_modules(Holder(models.Swish()), batch())
        set_speed(monkeypatch, then)
        model = Holder(models.Swish())
        again = hydroslurm.optimize_modules(model, batch())
        assert [row.applied for row in again][:1] == [row.applied for row in chosen][:1]
        assert ("forward" in vars(model.inner)) == (first > 1)
    (tmp_path / "0.5/fused/rank-00001.json").write_text('{"inner": 3}')
    with pytest.raises(UsageError, match="Remove it to have them chosen anew"):
        hydroslurm.optimize_modules(model, batch())


def test_without_a_batch(always: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On the first batch that is trained, behind the first step; at once in the next attempt."""
    model = Holder(models.Swish())
    table = hydroslurm.optimize_modules(model, record=tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torch.no_grad():
        model(batch())
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    other.step()
    model(batch()).sum().backward()
    assert not table.rows
    assert "forward" not in vars(model.inner)
    with caplog.at_level("INFO", logger="hydroslurm"):
        optimizer.step()
    assert [row.replacement for row in table.applied] == ["F.silu"]
    assert "F.silu" in caplog.text
    assert not model.inner._forward_pre_hooks
    x = batch()
    assert torch.equal(model.inner(x), F.silu(x))

    again = Holder(models.Swish())
    assert hydroslurm.optimize_modules(again, record=tmp_path).applied
    assert torch.equal(again.inner(x.requires_grad_()), F.silu(x))


def test_it_compiles_afterwards(always: None) -> None:
    """The whole model is one graph of torch.compile's; one that is compiled already is refused."""
    model = Holder(models.RMSNorm(WIDTH))
    hydroslurm.optimize_modules(model, batch())
    compiled, x = torch.compile(model, backend="eager", fullgraph=True), batch()
    torch.testing.assert_close(compiled(x), model(x))
    with pytest.raises(UsageError, match="give the model itself"):
        hydroslurm.optimize_modules(compiled)


def optimizers_of(weights: list[nn.Parameter]) -> Iterator[torch.optim.Optimizer]:
    yield torch.optim.AdamW(weights, 1e-2)
    yield torch.optim.Adam(weights, 1e-2, amsgrad=True)
    yield torch.optim.SGD(weights, 1e-2, momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4, WIDTH)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("number", range(3))
def test_an_optimizer(always: None, number: int) -> None:
    """Its weights and its state stay, its next steps are those of the other but for rounding, and
    one that is resumed goes on in the same way."""
    own = Holder(nn.Linear(WIDTH, WIDTH))
    fused = copy.deepcopy(own)
    theirs, ours = (list(optimizers_of(list(m.parameters())))[number] for m in (own, fused))
    scheduler = torch.optim.lr_scheduler.StepLR(ours, 1, gamma=1.0)
    for one in ((own, theirs), (fused, ours)):
        step(*one)
    scheduler.step()
    before = copy.deepcopy(fused.state_dict())
    table = hydroslurm.optimize_optimizer(ours)
    assert len(table.applied) == 1, str(table)
    assert all(torch.equal(before[name], one) for name, one in fused.state_dict().items())
    resumed_model = copy.deepcopy(fused)
    resumed = list(optimizers_of(list(resumed_model.parameters())))[number]
    resumed.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert resumed.param_groups[0]["fused"]
    for one in ((own, theirs), (fused, ours), (resumed_model, resumed)):
        step(*one)
    weights = (own.parameters(), fused.parameters(), resumed_model.parameters())
    for a, b, c in zip(*weights, strict=True):
        torch.testing.assert_close(a, b)
        assert torch.equal(b, c)


def test_an_optimizer_without_them(always: None) -> None:
    """Nothing is changed, and it is said."""
    optimizer = torch.optim.LBFGS([nn.Parameter(torch.zeros(2))])
    assert "has no fused form" in str(hydroslurm.optimize_optimizer(optimizer))
    with pytest.raises(UsageError, match="wanted an optimizer"):
        hydroslurm.optimize_optimizer(nn.Linear(1, 1))  # type: ignore[arg-type]

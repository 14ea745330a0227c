"""open_gate(): which gate one gets, and what is said when it is the lesser one."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from hydroslurm.errors import GateError, NoCompiler, UsageError
from hydroslurm.gate import GATE_ENV, open_gate


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an empty cache and nothing on PATH."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CXX", "HYDROSLURM_GATE_DIR", GATE_ENV):
        monkeypatch.delenv(name, raising=False)


def test_without_a_compiler_hooks_with_one_warning(no_compiler: None) -> None:
    """auto falls back, and one warning says what is lost and how to get it back."""
    with pytest.warns(RuntimeWarning) as caught:
        gate, _ = open_gate(), open_gate()
    assert gate.name == "hooks"
    message = str(caught[0].message)
    for word in (
        "module boundaries",
        "optimizer",
        "backward",
        "other threads",
        "g++",
        "hydroslurm gate build",
    ):
        assert word in message


def test_several_ranks_need_the_native_gate(no_compiler: None) -> None:
    """Hooks do not see collectives: several ranks are refused, with the two remedies."""
    with pytest.raises(GateError, match=r"2 ranks.*Load a compiler.*hydroslurm gate build"):
        open_gate(ranks=2)
    with pytest.raises(UsageError, match="module hooks hold one rank"):
        open_gate("hooks", ranks=2)
    with pytest.raises(NoCompiler):  # asked for by name it is never replaced by hooks
        open_gate("native")


def test_the_environment_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    """HYDROSLURM_GATE wins over the argument; a wrong word names the right ones. With a built gate,
    auto is native and says nothing."""
    monkeypatch.delenv(GATE_ENV, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_gate().name == "native"
    assert open_gate("native", environ={GATE_ENV: "hooks"}).name == "hooks"
    assert open_gate("hooks", environ={GATE_ENV: ""}).name == "hooks"
    with pytest.raises(UsageError, match="auto, native, hooks"):
        open_gate(environ={GATE_ENV: "fast"})

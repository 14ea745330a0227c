"""Gate events become numbered records with latencies."""

from __future__ import annotations

import pytest

from hydroslurm.core.events import EventKind
from hydroslurm.gate.protocol import Cause, GateEvent, Phase
from hydroslurm.runtime.journal import Recorder


def _seen(kind: EventKind, mono_ns: int, **fields: object) -> GateEvent:
    return GateEvent(kind=kind, mono_ns=mono_ns, epoch_ns=0, **fields)  # type: ignore[arg-type]


def test_one_pause_is_told_with_its_latencies() -> None:
    """All records of a pause carry its number, and latencies begin at the request's stamp."""
    recorder = Recorder()
    closed = recorder.record(
        _seen(EventKind.GATE_CLOSED, 2_000, value_ns=1_000, causes=Cause.SLURM)
    )
    held = recorder.record(
        _seen(EventKind.FIRST_OPERATOR_HELD, 3_000, text="aten::mm", phase=Phase.BACKWARD, tid=7)
    )
    parked = recorder.record(
        _seen(EventKind.PARKED, 3_000, value_ns=1_000, held=1, causes=Cause.SLURM)
    )
    opened = recorder.record(_seen(EventKind.RESUMED, 5_003_000, value_ns=5_001_000, held=1))
    released = recorder.record(_seen(EventKind.FIRST_OPERATOR_RELEASED, 5_011_000, tid=7))

    assert [data["pause"] for data in (closed, held, parked, opened, released)] == [1] * 5
    assert closed["causes"] == ["slurm"]
    assert held == {"pause": 1, "operator": "aten::mm", "phase": "backward", "tid": 7}
    assert parked["park_us"] == pytest.approx(2.0)
    assert opened["parked_s"] == pytest.approx(0.005)
    assert released["resume_us"] == pytest.approx(10.0)
    assert recorder.record(_seen(EventKind.GATE_CLOSED, 6_000_000))["pause"] == 2

"""Whatever lines, fields and bytes are left of a run's log: it is read, and becomes figures."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report.ranklog import RankLog, as_read
from report.views import figures_of

from hydroslurm.core.events import Event, EventKind
from hydroslurm.core.rundir import RunDir
from hydroslurm.report.attempts import attempts_of
from hydroslurm.report.history import History
from hydroslurm.report.reading import read_history


def full_log() -> list[Event]:
    """Two ranks, two attempts each: pauses of all causes, and a stop."""
    events: list[Event] = []
    for rank in range(2):
        for restart in range(2):
            at_s = 50.0 * restart
            log = RankLog(rank=rank, pid=50 + restart, restart_count=restart)
            log.trains(at_s, attempt=restart + 1, step=20 * restart)
            for number, cause in enumerate(("slurm", "user", "api", "terminal")):
                log.pause(at_s + 5 * number + 3, cause=cause, held=number != 2)
            stopped = {"step": 20 * restart + 20, "attempt": restart + 1}
            events += log.stop(at_s + 30, **stopped).events
    return events


FULL = full_log()


def _figures(events: list[Event]) -> dict[str, Any]:
    """As JSON, which has finite numbers only."""
    history = History(name="x", attempts=attempts_of(events))
    figures: dict[str, Any] = json.loads(json.dumps(figures_of(history).as_dict(), allow_nan=False))
    assert figures["pauses"] == len(history.pauses) == len(figures["every_pause"])
    return figures


@given(
    kept=st.lists(st.sampled_from(range(len(FULL))), unique=True, max_size=len(FULL)),
    ordered=st.booleans(),
)
def test_any_lines_may_be_lost(kept: list[int], ordered: bool) -> None:
    """Whatever lines are left, in whatever order, no duration and no loss is negative."""
    figures = _figures([FULL[index] for index in (sorted(kept) if ordered else kept)])
    assert figures["incomplete"] <= figures["pauses"]
    for row in (*figures["every_pause"], *figures["stops"]["every_stop"]):
        values = [row[key] for key in row if key.endswith(("_us", "_ms", "_s")) and key != "at_s"]
        assert all(value is None or value >= 0 for value in [*values, row.get("steps_lost")])


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
OF_STOPS = ("step", "attempt", "checkpoint_step", "ending", "reason")
OF_PAUSES = ("pause", "causes", "requested_mono_ns", "park_us", "held", "operator", "signal")


@settings(max_examples=50)
@given(st.data(), st.lists(st.sampled_from(OF_STOPS)))
def test_any_values_of_the_fields_that_there_are(data: st.DataObject, names: list[str]) -> None:
    """Damaged fields never raise, and what comes out can be written as JSON."""
    events: list[Event] = []
    for event in FULL:
        fields = {name: data.draw(scalars) for name in names if name in event.data}
        step = data.draw(scalars) if fields else event.step
        events.append(dataclasses.replace(event, data={**event.data, **fields}, step=step))
    _figures(list(as_read(events)))


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(list(EventKind)),
            st.integers(-(2**62), 2**62),
            st.dictionaries(st.sampled_from(OF_PAUSES), values) | values,
            values,
        ),
        max_size=12,
    )
)
def test_any_events(rows: list[tuple[EventKind, int, Any, Any]]) -> None:
    """Of any kind, time and content."""
    events = [
        Event(kind=kind, mono_ns=mono_ns, epoch_ns=mono_ns // 2, step=step, data=data)
        for kind, mono_ns, data, step in rows
    ]
    _figures(list(as_read(events)))


@given(noise=st.lists(st.binary(max_size=30), max_size=5), cut=st.integers(0, 400))
def test_any_bytes_in_the_file(
    tmp_path_factory: pytest.TempPathFactory, noise: list[bytes], cut: int
) -> None:
    """Bytes of any kind before the log, and a log cut off anywhere, can be read."""
    run_dir = RunDir(tmp_path_factory.mktemp("run"))
    path = RankLog().installed().pause(1).pause(3).write(run_dir)
    path.write_bytes(b"\n".join([*noise, path.read_bytes()])[: -cut or None])
    assert len(read_history(run_dir.root).pauses) <= 2

"""The event log: what is written is what is read, and trouble with the disk never reaches the
training."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydroslurm.events import Event, EventKind, EventLog, read_events

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner),
    max_leaves=5,
)


@given(
    kind=st.sampled_from(EventKind),
    mono_ns=st.integers(0, 2**62),
    rank=st.integers(0, 10**6),
    step=st.none() | st.integers(0, 2**40),
    data=st.dictionaries(st.text(), _JSON, max_size=4),
)
def test_an_event_survives_its_line(
    kind: EventKind, mono_ns: int, rank: int, step: int | None, data: dict[str, object]
) -> None:
    """Any event is one line, and reads back equal."""
    event = Event(kind=kind, mono_ns=mono_ns, epoch_ns=5, rank=rank, step=step, data=data)
    line = event.to_json()
    assert "\n" not in line
    assert Event.from_json(line) == event


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    """What a crash tore, or another program wrote, hides no whole event."""
    log = EventLog(tmp_path / "events" / "rank-00000.jsonl")
    log.append(Event(EventKind.INSTALLED, 1, 1))
    assert log.path is not None
    with log.path.open("ab") as file:
        file.write(b'{"v":1,"kind":"par\n{"v":99}\n\xff\xfe\n[1,2]\n')
        file.write(b'{"v":1,"kind":"parked","mono_ns":Infinity}\n')
    log.append(Event(EventKind.PARKED, 2, 2, data={"park_us": 50.0}))
    with log.path.open("ab") as file:
        file.write(b'{"v":1,"kind":"resumed","mono_')
    assert [e.kind for e in read_events(log.path)] == [EventKind.INSTALLED, EventKind.PARKED]


def test_a_missing_folder_costs_one_warning_and_nothing_else(tmp_path: Path) -> None:
    """A log that cannot be opened warns once, names the file, and stays silent from then on."""
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    log = EventLog(blocked / "rank-00000.jsonl")
    with pytest.warns(RuntimeWarning, match="can no longer be written"):
        log.append(Event(EventKind.PARKED, 1, 1))
    log.append(Event(EventKind.RESUMED, 2, 2))  # a second warning would fail the test
    assert not log.working


def test_a_full_disk_costs_one_warning_and_nothing_else(tmp_path: Path) -> None:
    """When the file may grow no more (as on a full disk) the log warns once and training goes
    on."""
    path = tmp_path / "rank-00000.jsonl"
    log = EventLog(path)
    log.append(Event(EventKind.INSTALLED, 1, 1))
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
        with pytest.warns(RuntimeWarning, match="training goes on"):
            log.append(Event(EventKind.PARKED, 2, 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    log.append(Event(EventKind.RESUMED, 3, 3))
    assert [e.kind for e in read_events(path)] == [EventKind.INSTALLED]
    log.close()


def test_a_log_without_a_file_keeps_nothing() -> None:
    """EventLog(None) takes events and says that it keeps none."""
    log = EventLog(None)
    log.append(Event(EventKind.INSTALLED, 1, 1))
    assert not log.working


def test_events_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    """The file and its folder are made 0600 and 0700."""
    log = EventLog(tmp_path / "events" / "rank-00000.jsonl")
    log.append(Event(EventKind.INSTALLED, 1, 1))
    assert log.path is not None
    assert log.path.stat().st_mode & 0o777 == 0o600
    assert log.path.parent.stat().st_mode & 0o077 == 0
    assert [p.name for p in log.path.parent.iterdir()] == ["rank-00000.jsonl"]

"""The event log: what is written is what is read, and trouble with the disk never reaches the
training."""

from __future__ import annotations

import json
import os
import resource
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hydroslurm.core import events
from hydroslurm.core.ack import judge_pause, judge_resume, judge_stop, judge_vacate
from hydroslurm.core.events import MOST_LINE_BYTES, Event, EventKind, EventLog, read_events
from hydroslurm.core.files import clean
from hydroslurm.core.status import RankStatus, after, fold

_NAMES = sorted(events._Known.__annotations__)
_OTHER = st.text().filter(lambda name: name not in _NAMES)
_SCALAR = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text()
_LIST = st.lists(_SCALAR, max_size=3)
_JSON = _SCALAR | st.lists(_SCALAR | _LIST, max_size=3)


@given(
    kind=st.sampled_from(EventKind),
    mono_ns=st.integers(0, 2**62),
    rank=st.integers(0, 10**6),
    step=st.none() | st.integers(0, 2**40),
    data=st.dictionaries(_OTHER, _JSON, max_size=4),
)
def test_an_event_survives_its_line(
    kind: EventKind, mono_ns: int, rank: int, step: int | None, data: dict[str, object]
) -> None:
    """Any event is one line, and reads back equal."""
    event = Event(kind=kind, mono_ns=mono_ns, epoch_ns=5, rank=rank, step=step, data=data)
    line = event.to_json()
    assert "\n" not in line
    assert Event.from_json(line) == event


ATTACKS = (
    b"[" * 60_000,
    b'{"a":' * 60_000,
    b'{"v":1,"kind":"installed","mono_ns":' + b"9" * 400 + b"}",
    b'{"v":1,"kind":"installed","mono_ns":1e999}',
    b'{"v":1,"kind":"parked","mono_ns":Infinity}',
    b'{"v":1,"kind":["installed"]}',
    b"null",
    b"",
)


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    """What a crash tore, or another program wrote, hides no whole event: deep, long, unprintable
    and ill-typed lines are no events, and nothing else. The file and its folder are their owner's
    only."""
    log = EventLog(tmp_path / "events" / "rank-00000.jsonl")
    log.append(Event(EventKind.INSTALLED, 1, 1))
    assert log.path is not None
    with log.path.open("ab") as file:
        file.write(b'{"v":1,"kind":"par\n{"v":99}\n\xff\xfe\n[1,2]\n')
        file.writelines(line + b"\n" for line in ATTACKS)
    log.append(Event(EventKind.PARKED, 2, 2, data={"park_us": 50.0}))
    with log.path.open("ab") as file:
        file.write(b'{"v":1,"kind":"resumed","mono_')
    assert [e.kind for e in read_events(log.path)] == [EventKind.INSTALLED, EventKind.PARKED]
    assert log.path.parent.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in log.path.parent.iterdir())


@contextmanager
def _no_growth(path: Path, *, most_more: int = 20) -> Iterator[None]:
    """The file may grow no more, as on a full disk."""
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + most_more, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_full_disk_costs_one_warning(tmp_path: Path) -> None:
    """While the file cannot grow the log warns once, and keeps nothing; the next event after that
    tells how many were lost, and the torn line is glued to none. What shows the warning may record
    events."""
    path = tmp_path / "rank-00000.jsonl"
    log = EventLog(path)
    log.append(Event(EventKind.INSTALLED, 1, 1))
    with _no_growth(path), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for number in range(2, 1003):
            log.append(Event(EventKind.PARKED, number, number))
    assert ["training goes on" in str(one.message) for one in warned] == [True]
    shown = list[str]()

    def show(message: Warning | str, *_: object) -> None:
        shown.append(str(message))
        log.append(Event(EventKind.DRAINED, 2001, 5))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        log.append(Event(EventKind.RESUMED, 2000, 4))
    assert ["again" in one for one in shown] == [True]
    log.close()
    installed, dropped, *others = read_events(path)
    assert installed.kind is EventKind.INSTALLED
    assert [one.kind for one in others] == [EventKind.RESUMED, EventKind.DRAINED]
    assert (dropped.kind, dropped.data) == (EventKind.EVENTS_DROPPED, {"count": 1001})
    _, torn, *_ = path.read_bytes().splitlines()
    assert torn == Event(EventKind.PARKED, 2, 2).to_json().encode()[: len(torn)]


_ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None), max_size=20)
    | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_ROWS = st.fixed_dictionaries(
    {
        "v": st.just(1) | _ANY,
        "kind": st.sampled_from([kind.value for kind in EventKind]) | _ANY,
        "mono_ns": st.integers(0, 2**63) | _ANY,
        "epoch_ns": st.integers(0, 2**63) | _ANY,
        "rank": st.integers(0, 9) | _ANY,
        "restart_count": st.just(0) | _ANY,
        "pid": st.just(7) | _ANY,
        "host": st.text() | _ANY,
        "step": st.integers() | _ANY,
        "job_id": st.none() | _ANY,
        "data": st.dictionaries(
            st.sampled_from(_NAMES), st.integers(0, 3) | st.lists(st.text()) | _ANY
        ),
    }
)


@given(rows=st.lists(_ROWS, max_size=6))
def test_whatever_stands_in_a_line(rows: list[dict[str, object]]) -> None:
    """Any line is an event or ValueError; no event ends what is told of a rank, of an answer or
    of a job."""
    state = None
    before: RankStatus | None = None
    judges = (judge_pause, judge_vacate, judge_resume, judge_stop)
    for row in rows:
        try:
            event = Event.from_json(json.dumps(row))
        except ValueError:
            continue
        state = after(state, event)
        assert RankStatus.from_json(state.to_json()) == state
        before = before or state
        answers = [judge(before, state, late) for judge in judges for late in (False, True)]
        words = [answer.message for answer in answers if answer]
        json.dumps([json.loads(state.to_json()), words], allow_nan=False)
        shown = clean(" ".join([state.host, state.state, *state.causes, *words]))
        assert shown.isprintable()
        shown.encode()


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    """An error of torch's may have a megabyte; its event is there, with the beginning of it."""
    log = EventLog(tmp_path / "rank-00000.jsonl")
    names = {str(number): number for number in range(9999)}
    for reason in ("short", "é" * MOST_LINE_BYTES):
        log.append(
            Event(EventKind.SAVE_FAILED, 1, 1, data={"reason": reason, "pids": names, "n": 1})
        )
    log.append(Event(EventKind.SAVE_FAILED, 1, 1, data={"reason": "short"}))
    log.close()
    told = [event.data for event in read_events(tmp_path / "rank-00000.jsonl")]
    assert told == [
        {"reason": "short", "n": 1},
        {"reason": "é" * 1000, "n": 1},
        {"reason": "short"},
    ]


def test_a_huge_file_is_read_from_its_end(tmp_path: Path) -> None:
    """A sparse terabyte takes no longer than what is looked at of it."""
    path = tmp_path / "rank-00000.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + Event(EventKind.INSTALLED, 1, 1).to_json().encode() + b"\n")
    state = fold(read_events(path))
    assert state is not None
    assert state.state == "running"
    assert len(list(read_events(path))) == 1

"""Files of one JSON object per line, whose writers may be killed at any byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hydroslurm.core.events import Event, EventKind, EventLog, read_events
from hydroslurm.core.files import append_entry, entries_of
from hydroslurm.elastic.coordinator import restored
from hydroslurm.elastic.folder import CoordinatorOptions, ElasticFolder
from hydroslurm.jobs.supervisor.attempts import Attempts
from hydroslurm.jobs.supervisor.conditions import (
    add_condition,
    final_condition,
    read_conditions,
)
from hydroslurm.training.attempts import AttemptLog


def test_a_torn_line_takes_no_other_with_it(tmp_path: Path) -> None:
    """Torn at any byte, the last line alone is lost, and the next entry is there."""
    path = tmp_path / "journal.jsonl"
    append_entry(path, {"n": 1})
    whole = path.read_bytes()
    for torn in range(len(whole)):
        path.write_bytes(whole + whole[:torn])
        append_entry(path, {"n": 2})
        entries = list(entries_of(path.read_bytes().splitlines()))
        assert (entries[0], entries[-1]) == ({"n": 1}, {"n": 2})


def conditions(path: Path) -> int:
    """The last is the verdict."""
    add_condition(path, "Succeeded")
    verdict = final_condition(read_conditions(path))
    return int(verdict is not None and verdict.type == "Succeeded")


def supervised(path: Path) -> int:
    """The number of a new attempt of the job."""
    return Attempts(path).begin(0).number


def attempts(path: Path) -> int:
    """The number of a new attempt of the training."""
    log = AttemptLog(path)
    number = log.begin(3, now_epoch_ns=1, job_id=7, restart_count=0)
    log.end(number, "preempted", step=4, now_epoch_ns=2)
    assert log.attempts()[-1].ending == "preempted"
    return number


def coordinators(path: Path) -> int:
    """The number of a new coordinator, which begins those of its changes."""
    folder = ElasticFolder(run=path)
    _, number = restored(folder, CoordinatorOptions(), 0.0)
    folder.record("coordinator", {"epoch": number, "pid": 1})
    return number


def events(path: Path) -> int:
    """How many there are."""
    EventLog(path).append(Event(EventKind.INSTALLED, 1, 1))
    return len(list(read_events(path)))


@pytest.mark.parametrize("record", [conditions, supervised, attempts, coordinators, events])
def test_what_is_recorded_counts(tmp_path: Path, record: Callable[[Path], int]) -> None:
    """In every journal, behind a line that is torn at any byte, and when it has hundreds of
    megabytes: no verdict is lost, and no number comes twice."""
    place = tmp_path / "journal.jsonl"
    path = ElasticFolder(run=place).ledger_jsonl if record is coordinators else place
    for _ in range(2):
        record(place)
    whole = path.read_bytes()
    for torn in range(whole[:-1].rfind(b"\n") + 1, len(whole), 23):
        path.write_bytes(whole[:torn])
        first = record(place)
        assert record(place) == first + (record is not conditions)
    with path.open("wb") as file:
        for number in range(1, 300):
            file.seek(number << 20)
            file.write(b"\n")
        file.write(whole)
    assert record(place) == (1 if record is conditions else 3)


def test_entries_are_any_text(tmp_path: Path) -> None:
    """Text is written as it is; half of a character is written as JSON writes it, and its entry,
    which could not be printed, is skipped like all that is no entry."""
    path = tmp_path / "journal.jsonl"
    append_entry(path, {"text": "größer"}, durable=False)
    append_entry(path, {"text": "\udc80"})
    append_entry(path, {"n": 3})
    assert path.read_text().splitlines()[:2] == ['{"text": "größer"}', '{"text": "\\udc80"}']
    path.write_bytes(path.read_bytes() + b"[1]\nnull\n\n\xff\n")
    assert list(entries_of(path.read_bytes().splitlines())) == [{"text": "größer"}, {"n": 3}]

"""The status of a rank: the fold of its events, its file, and who writes it."""

from __future__ import annotations

import json
import math
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from processes import child

from hydroslurm.cli.status import _since, rank_line
from hydroslurm.core.events import Event, EventKind
from hydroslurm.core.status import (
    LIMIT_BYTES,
    Moment,
    RankStatus,
    after,
    fold,
    load_status,
    read_status,
    status_of,
)
from hydroslurm.runtime.journal import HEARTBEAT_ENV, StatusWriter, interval_s


def _event(kind: EventKind, at: int, **data: object) -> Event:
    return Event(kind, at, at, rank=3, pid=99, host="n1", step=at, data=data)


PAUSED = [
    _event(EventKind.INSTALLED, 1),
    _event(EventKind.SIGNAL_RECEIVED, 2, signal="SIGUSR1"),
    _event(EventKind.GATE_CLOSED, 3, pause=1, causes=["user"]),
    _event(EventKind.PARKED, 4, pause=1, park_us=51.5, causes=["user"], held=1),
]


INSTALLED, _, CLOSED, PARK = PAUSED
JOINED = _event(EventKind.RANKS_JOINED, 1, world_size=4, joined_s=0.1)
ALL_PARKED = _event(EventKind.ALL_PARKED, 8, of_ranks=[3], in_flight=0)
RESUMED = _event(EventKind.RESUMED, 9, pause=1, causes=[])
BEHIND = _event(EventKind.PARKED, 6, pause=1, park_us=900.0, causes=["user", "peers"], held=1)
LOST = _event(EventKind.AGREEMENT_FAILED, 9, what="connection", message="gone")
NOT_AGREED = _event(EventKind.AGREEMENT_FAILED, 9, what="park", message="late")
NOT_COPIED = _event(EventKind.SAVE_NOT_COPIED, 2, reason="there is no memory")


@pytest.mark.parametrize(
    ("events", "state", "since", "together"),
    [
        (PAUSED[:2], "running", 1, False),
        (PAUSED[:3], "parking", 3, False),
        (PAUSED, "parked", 4, False),
        ([*PAUSED, RESUMED], "running", 9, False),
        # told to stop it stays stopping while it runs to its safe point
        ([*PAUSED, _event(EventKind.STOP_REQUESTED, 5), RESUMED], "stopping", 5, False),
        # let through it parks again behind each collective; its state is that of the first time
        ([*PAUSED, _event(EventKind.LET_THROUGH, 5, pause=1), BEHIND], "parked", 4, False),
        # together from the word that all are, until it goes on or the coordinator is gone
        ([INSTALLED, JOINED, *PAUSED[1:], ALL_PARKED], "parked", 4, True),
        ([*PAUSED, ALL_PARKED, RESUMED], "running", 9, False),
        ([INSTALLED, JOINED, LOST], "running", 1, False),
        ([INSTALLED, JOINED, *PAUSED[1:], ALL_PARKED, NOT_AGREED], "parked", 4, False),
        # the line of a closing may follow that of the agreement which came of it
        ([INSTALLED, ALL_PARKED, CLOSED, PARK], "parked", 4, True),
    ],
)
def test_states_follow_the_events(
    events: list[Event], state: str, since: int, together: bool
) -> None:
    """Each since its own event."""
    told = fold(events)
    assert told is not None
    assert (told.state, told.since.epoch_ns) == (state, since)
    assert told.parked_together == together
    assert told.world_size == (4 if JOINED in events and LOST not in events else 1)
    assert ("user" in told.causes) == (state in ("parking", "parked"))
    if state == "parked":
        assert (told.park_us, told.pauses) == (51.5, 1)


def test_what_is_shown() -> None:
    """Ages, of a host whose clock is ahead too; and that saves hold the training up, from the first
    on that was not copied, until one is."""
    s, now_ns = 10**9, 50_000 * 10**9
    assert _since(53_570 * s, now_ns) == "since 3,570 s in the future by this host's clock"
    assert _since(now_ns - 3 * s, now_ns) == "since 3.0 s"
    held, copied = fold([INSTALLED, NOT_COPIED]), _event(EventKind.SAVE_STAGED, 3, reason="")
    assert held is not None
    assert "saves hold the training up: there is no memory" in rank_line(held, now_epoch_ns=5)
    assert "hold" not in rank_line(after(held, copied), now_epoch_ns=5)


def test_a_long_history_makes_no_long_status(tmp_path: Path) -> None:
    """Whatever has happened before, the file is small, and says the same as all events do, which
    are written together, a moment later."""
    log = tmp_path / "rank-00003.jsonl"
    writer = StatusWriter(status_of(log), every_s=0.0)
    assert writer.wait_s() == math.inf
    events = [PAUSED[0], *(_event(EventKind.CAUSES_CHANGED, at, causes=[]) for at in range(5_000))]
    for event in (*events, *PAUSED[2:]):
        writer.note(event)
    assert writer.wait_s() != math.inf
    assert not status_of(log).exists()
    writer.close(step=None)
    assert status_of(log).stat().st_size < 2048
    status = load_status(status_of(log))
    assert status.state == "parked"
    assert replace(status, as_of=Moment(4, 4)) == fold((*events, *PAUSED[2:]))


# --- over attempts -------------------------------------------------------------------------------


def test_what_outlives_an_attempt(tmp_path: Path) -> None:
    """The next process of the rank reads what is saved, who was preempted and how long pauses took;
    moments of another boot keep their date. Another job in the same folder was not preempted, and
    nobody in it saves yet."""
    began = _event(EventKind.ATTEMPT_BEGAN, 6, step=3)
    saved = _event(EventKind.SAVE_COMMITTED, 7, checkpoint_step=40, seconds=2.5)
    stop = _event(EventKind.STOP_REASON, 8, reason="preempted")
    again = replace(_event(EventKind.INSTALLED, 20, boot="b2"), restart_count=1)
    path = tmp_path / "rank-00003.json"
    for attempt in ([*PAUSED, began, saved, stop], [again]):
        writer = StatusWriter(path, every_s=0.0)
        for event in attempt:
            writer.note(event)
        writer.close(step=None)
    status = load_status(path)
    assert (status.committed_step, status.committed) == (40, Moment(0, 7))
    assert (status.save_s, status.preempted) == (2.5, ((0, 8),))
    assert (sum(status.pause_counts), status.pause_sum_s) == (1, 51.5e-6)
    assert (status.started, status.pauses) == (Moment(20, 20), 0)
    assert (status.state, status.causes) == ("running", ())
    other = after(status, replace(again, job_id=5))
    assert (other.preempted, other.committed_step) == ((), 40)
    for now, saver, step in ((status, "attempt_began", 3), (other, "", None)):
        assert (now.saver, now.attempt_step, now.attempt_began is None) == (saver, step, not saver)


# --- the file ------------------------------------------------------------------------------------


def _hostile(status: RankStatus) -> dict[str, bytes]:
    row = json.loads(status.to_json())
    changed: dict[str, object] = {
        "older": {"v": 0}, "newer": {"v": 2}, "state": {"state": "owned"}, "saver": {"saver": "me"},
        "numbers": {"step": 1 << 70}, "negative": {"since": [-1, 5]}, "flag": {"finished": 1},
        "moment": {"since": [1, 2, 3]}, "depth": {"causes": [[["a"]]]},
        "nothing": {"pause_counts": None}, "buckets": {"pause_counts": [1]},
    }  # fmt: skip
    found = {
        name: json.dumps({**row, **words}).encode()  # type: ignore[dict-item]
        for name, words in changed.items()
    }
    whole = status.to_json().encode()
    return {
        **found,
        "torn": whole[: len(whole) // 2],
        "empty": b"",
        "long": whole.ljust(LIMIT_BYTES + 1),
        "deep": b"[" * 60_000,
        "bytes": b"\xff\xfe",
        "list": b"[]",
        "parts": whole.replace(b'"time":null', b'"time":{"parts":{"message":1.0}}'),
        "infinite": whole.replace(b'"park_us":51.5', b'"park_us":1e999'),
    }


def test_foreign_files_are_no_status(tmp_path: Path) -> None:
    """Torn, ill-typed, too long, of another version."""
    status = fold(PAUSED)
    assert status is not None
    path = tmp_path / "rank-00000.json"
    for name, content in _hostile(status).items():
        path.write_bytes(content)
        assert read_status(path) is None, name
    path.write_bytes(_hostile(status)["older"])
    with pytest.raises(ValueError, match="of another version of hydroslurm"):
        load_status(path)


WRITE = """
    import sys
    from pathlib import Path
    from hydroslurm.core.events import Event, EventKind
    from hydroslurm.runtime.journal import StatusWriter
    writer = StatusWriter(Path(sys.argv[1]), every_s=0.0)
    step = 0
    while True:
        step += 1
        data = {"causes": ["x" * (step % 1500)]}
        writer.note(Event(EventKind.CAUSES_CHANGED, step, step, step=step, data=data))
        writer.write(step, at_once=True)
        if step == 1:
            print("ready", flush=True)
"""


def test_a_kill_leaves_a_whole_status(tmp_path: Path) -> None:
    """Whoever reads while it is written, or after its writer was killed, finds a whole status, the
    newest or the one before."""
    path = tmp_path / "rank-00000.json"
    dice = random.Random(7)
    for _ in range(3):
        with child(WRITE, tmp_path, str(path)) as writer:
            writer.expect("ready")
            until_s = time.monotonic() + dice.uniform(0.02, 0.2)
            steps = []
            while time.monotonic() < until_s:
                steps.append(load_status(path).step or 0)
            assert steps == sorted(steps)
            writer.process.send_signal(signal.SIGKILL)
            writer.process.wait()
            assert (load_status(path).step or 0) >= steps[-1]


# --- the writer ----------------------------------------------------------------------------------


def test_heartbeat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank's step and rate can be read while it trains; without a step and without events nothing
    is written, and a folder that is not there is tried again without a word. HYDROSLURM_HEARTBEAT_S
    counts where it is a number; where it is none it ends no training, and one line says so."""
    texts = {"": 10.0, "0": 0.0, "-3": 0.0, "nan": 10.0, "x": 10.0, "2": 2.0}
    assert {text: interval_s({HEARTBEAT_ENV: text}) for text in texts} == texts
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" is no number")[0][-3:] for line in said] == ["an'", "'x'"]
    path = tmp_path / "events" / "rank-00003.json"
    writer = StatusWriter(path, every_s=0.1, look=lambda step: {"stands_at": f"step {step}"})

    def wait() -> None:
        time.sleep(writer.wait_s() or 0.0)

    writer.note(PAUSED[0])
    wait()
    writer.write(None)
    assert not path.exists()
    path.parent.mkdir()
    for step in (None, 4, 9):
        wait()
        writer.write(step)
        time.sleep(0.1)
    while read_status(path) is None or load_status(path).step != 9:
        wait()
        writer.write(9)
    wait()
    writer.write(9)
    told = load_status(path)
    assert (told.step, told.heartbeat_s, told.state) == (9, 0.1, "running")
    assert told.stands_at == "step 9"
    assert told.steps_per_s is not None
    assert 0 < told.steps_per_s <= 50
    writer.write(10)  # too soon
    assert load_status(path) == told
    wait()
    writer.write(9)
    later = load_status(path)
    assert later.step_since == told.step_since
    assert later.as_of > told.as_of
    writer.close(step=9)
    assert load_status(path) == later


def test_a_full_disk_has_room_for_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no second file can be made, the first is written over in place; a shorter status leaves
    nothing of the longer one."""
    path = tmp_path / "rank-00003.json"
    writer = StatusWriter(path, every_s=0.0)
    writer.note(_event(EventKind.INSTALLED, 1))
    writer.note(_event(EventKind.CAUSES_CHANGED, 2, causes=["a long cause" * 20]))
    writer.write(None, at_once=True)
    inode = path.stat().st_ino

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hydroslurm.runtime.journal.write_atomically", no_room)
    writer.note(_event(EventKind.CAUSES_CHANGED, 3, causes=[]))
    writer.write(None, at_once=True)
    assert path.stat().st_ino == inode
    assert load_status(path).causes == ()

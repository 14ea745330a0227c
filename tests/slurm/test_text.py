"""Slurm's text becomes values, and what cannot be read is refused."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydroslurm.errors import UnreadableOutput
from hydroslurm.slurm import text
from hydroslurm.slurm.values import JobState


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A time zone with summer time, whatever this machine has."""
    before = os.environ.get("TZ")
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    if before is None:
        monkeypatch.delenv("TZ")
    else:
        monkeypatch.setenv("TZ", before)
    time.tzset()


DURATIONS = {"1-02:03:04": 93784, "02:03:04": 7384, "10:00": 600, "00:00:00": 0}
UNBOUNDED = dict.fromkeys(("UNLIMITED", "infinite", "Partition_Limit", "N/A"))


@pytest.mark.parametrize(("words", "seconds"), [*DURATIONS.items(), *UNBOUNDED.items()])
def test_durations(words: str, seconds: int | None) -> None:
    """Every form in which Slurm prints a duration is read, and the unbounded ones are None."""
    assert text.parse_duration_s(words) == seconds


@given(st.none() | st.integers(min_value=0, max_value=10**9))
def test_duration_round_trip(seconds: int | None) -> None:
    """What is written as a duration is read back as the same number of seconds."""
    assert text.parse_duration_s(text.format_duration(seconds)) == seconds


def test_moments(berlin: None) -> None:
    """Epoch seconds and local time are read as the same moment, in winter and in summer; all of
    Slurm's words for "no moment" are None."""
    assert text.parse_moment("1795204093") == 1795204093
    assert text.parse_moment("2026-11-20T20:48:13") == 1795204093
    assert text.parse_moment("2026-07-01T02:00:00") == 1782864000
    for words in ("Unknown", "None", "N/A", "(null)", "", "0"):
        assert text.parse_moment(words) is None


def test_memory() -> None:
    """Memory is read in bytes, megabytes being Slurm's unit, and 0 is "not asked for"."""
    read = text.parse_memory_bytes
    assert (read("4Gn"), read("2000Mc"), read("62.50G")) == (4 * 2**30, 2000 * 2**20, 67108864000)
    assert read("2000") == 2000 * 2**20
    assert (read("0"), read(""), read("UNLIMITED")) == (None, None, None)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("n[1-4,7],m01", "n1 n2 n3 n4 n7 m01"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("rack[1-2]-ib", "rack1-ib rack2-ib"),
        ("None assigned", ""),
    ],
)
def test_node_lists(words: str, names: str) -> None:
    """Node lists are expanded in their order, padding kept, several ranges in one name included."""
    assert text.expand_nodes(words) == tuple(names.split())


@pytest.mark.parametrize(
    ("words", "state", "flags"),
    [
        ("CANCELLED by 1000", "CANCELLED", "CANCELLED"),
        ("CANCELLED+", "CANCELLED", "CANCELLED"),
        (["RUNNING", "COMPLETING"], "COMPLETING", "RUNNING COMPLETING"),
        (["PENDING", "REQUEUED"], "REQUEUED", "PENDING REQUEUED"),
        (["REQUEUED", "COMPLETING", "PENDING"], "COMPLETING", "REQUEUED COMPLETING PENDING"),
        (["SUSPENDED", "SIGNALING"], "SUSPENDED", "SUSPENDED SIGNALING"),
        ("SIGNALING", "RUNNING", "SIGNALING"),
        ("BRAND_NEW", "UNKNOWN", "BRAND_NEW"),
    ],
)
def test_states(words: str | list[str], state: str, flags: str) -> None:
    """Every form gives the word that squeue shows, all words beside it, and new words no error."""
    assert text.parse_state(words) == (JobState(state), frozenset(flags.split()))


REFUSED = {
    text.parse_duration_s: ("30", "1-2", "1:2:3:4", "-1:00:00"),
    text.parse_moment: ("yesterday", "12:30", "2026-13-40T00:00:00"),
    text.parse_memory_bytes: ("4 GB",),
    text.expand_nodes: ("n[1-", "n]1[", "n[3-1]", "n[a-b]", "n[0-99999999]", "a[0-9999]b[0-9999]"),
    text.parse_state: ("", []),
}


@pytest.mark.parametrize(
    ("read", "words"), [(read, words) for read, all_of in REFUSED.items() for words in all_of]
)
def test_what_slurm_never_prints_is_refused(read, words) -> None:
    """A bare number has no unit, a moment is not taken for "none", and a node list of more nodes
    than exist is refused before memory is gone: with the text in the message."""
    with pytest.raises(UnreadableOutput) as refused:
        read(words)
    assert repr(words)[:80] in str(refused.value)

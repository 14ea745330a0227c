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


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ("1-02:03:04", 93784),
        ("02:03:04", 7384),
        ("10:00", 600),
        ("00:00:00", 0),
        ("365-00:00:00", 31536000),
        ("UNLIMITED", None),
        ("infinite", None),
        ("Partition_Limit", None),
        ("N/A", None),
        ("NONE", None),
    ],
)
def test_durations(words: str, seconds: int | None) -> None:
    """Every form in which Slurm prints a duration is read, and the unbounded ones are None."""
    assert text.parse_duration_s(words) == seconds


@pytest.mark.parametrize("words", ["30", "1-2", "soon", "1:2:3:4", "-1:00:00"])
def test_durations_refused(words: str) -> None:
    """A bare number has no unit, and anything else is no duration: both are refused by name."""
    with pytest.raises(UnreadableOutput, match="not a duration"):
        text.parse_duration_s(words)


@given(st.none() | st.integers(min_value=0, max_value=10**9))
def test_duration_round_trip(seconds: int | None) -> None:
    """What is written as a duration is read back as the same number of seconds."""
    assert text.parse_duration_s(text.format_duration(seconds)) == seconds


@pytest.mark.parametrize("words", ["Unknown", "None", "N/A", "(null)", "", "0"])
def test_no_moment(words: str) -> None:
    """All of Slurm's words for "no moment" are None."""
    assert text.parse_moment(words) is None


def test_moments(berlin: None) -> None:
    """Epoch seconds and local time are read as the same moment, in winter and in summer."""
    assert text.parse_moment("1795204093") == 1795204093
    assert text.parse_moment("2026-11-20T20:48:13") == 1795204093
    assert text.parse_moment("2026-07-01T02:00:00") == 1782864000


@pytest.mark.parametrize("words", ["yesterday", "12:30", "2026-13-40T00:00:00"])
def test_moments_refused(words: str) -> None:
    """A moment that cannot be read is refused, not taken for "none"."""
    with pytest.raises(UnreadableOutput, match="not a time as Slurm prints it"):
        text.parse_moment(words)


@pytest.mark.parametrize(
    ("words", "n_bytes"),
    [
        ("4Gn", 4 * 2**30),
        ("2000M", 2000 * 2**20),
        ("2000Mc", 2000 * 2**20),
        ("2000", 2000 * 2**20),
        ("62.50G", 67108864000),
        ("1T", 2**40),
        ("512K", 2**19),
        ("0", None),
        ("", None),
        ("UNLIMITED", None),
    ],
)
def test_memory(words: str, n_bytes: int | None) -> None:
    """Memory is read in bytes, megabytes being Slurm's unit, and 0 is "not asked for"."""
    assert text.parse_memory_bytes(words) == n_bytes


def test_memory_refused() -> None:
    """Something else than an amount is refused."""
    with pytest.raises(UnreadableOutput, match="not an amount of memory"):
        text.parse_memory_bytes("4 GB")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("n[1-4,7],m01", "n1 n2 n3 n4 n7 m01"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[9-10]", "n9 n10"),
        ("login", "login"),
        ("a,b,c", "a b c"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("rack[1-2]-ib", "rack1-ib rack2-ib"),
        ("(null)", ""),
        ("None assigned", ""),
        ("", ""),
    ],
)
def test_node_lists(words: str, names: str) -> None:
    """Node lists are expanded in their order, padding kept, several ranges in one name included."""
    assert text.expand_nodes(words) == tuple(names.split())


@pytest.mark.parametrize(
    "words", ["n[1-", "n]1[", "n[3-1]", "n[a-b]", "n[]", "n[0-99999999]", "a[0-9999]b[0-9999]"]
)
def test_node_lists_refused(words: str) -> None:
    """What is no node list, or names more nodes than exist, is refused before memory is gone."""
    with pytest.raises(UnreadableOutput, match="node"):
        text.expand_nodes(words)


@pytest.mark.parametrize(
    ("words", "state", "flags"),
    [
        ("RUNNING", "RUNNING", "RUNNING"),
        ("CANCELLED by 1000", "CANCELLED", "CANCELLED"),
        ("CANCELLED+", "CANCELLED", "CANCELLED"),
        ("SPECIAL_EXIT", "SPECIAL_EXIT", "SPECIAL_EXIT"),
        (["RUNNING"], "RUNNING", "RUNNING"),
        (["RUNNING", "COMPLETING"], "COMPLETING", "RUNNING COMPLETING"),
        (["PENDING", "REQUEUED"], "REQUEUED", "PENDING REQUEUED"),
        (["REQUEUED", "COMPLETING", "PENDING"], "COMPLETING", "REQUEUED COMPLETING PENDING"),
        (["SUSPENDED", "SIGNALING"], "SUSPENDED", "SUSPENDED SIGNALING"),
        ("SIGNALING", "RUNNING", "SIGNALING"),
        (["RUNNING", "BRAND_NEW"], "RUNNING", "RUNNING BRAND_NEW"),
        ("BRAND_NEW", "UNKNOWN", "BRAND_NEW"),
    ],
)
def test_states(words: str | list[str], state: str, flags: str) -> None:
    """Every form gives the word that squeue shows, all words beside it, and new words no error."""
    assert text.parse_state(words) == (JobState(state), frozenset(flags.split()))


@pytest.mark.parametrize("words", ["", []])
def test_no_state_refused(words: str | list[str]) -> None:
    """A job has a state."""
    with pytest.raises(UnreadableOutput, match="without a state"):
        text.parse_state(words)


def test_ended_and_waiting_exclude_each_other() -> None:
    """No state is both over and waiting, and what uses resources is neither."""
    assert not any(state.has_ended and state.is_waiting for state in JobState)
    for state in (JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING):
        assert not state.has_ended
        assert not state.is_waiting

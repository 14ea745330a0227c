"""Files of one JSON object per line, whose writers may be killed at any byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydroslurm.core.journal import append_entry, entries_of


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


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """Nothing is written where a link leads."""
    (tmp_path / "mine").write_text("")
    (tmp_path / "journal.jsonl").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic link"):
        append_entry(tmp_path / "journal.jsonl", {})
    assert (tmp_path / "mine").read_text() == ""

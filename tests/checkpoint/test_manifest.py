"""The commit marker: read back as written, from the future, and damaged."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import hydroslurm
from hydroslurm.checkpoint import manifest
from hydroslurm.checkpoint.checksummed_file import FileEntry
from hydroslurm.checkpoint.manifest import Checkpoint, Manifest, WrittenBy, as_told, read_again
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.errors import CheckpointCorrupt, CheckpointTooNew, CheckpointTooOld, UsageError

ONE = Manifest(
    step=12,
    epoch=3,
    kind="stop",
    created_epoch_ns=1_700_000_000_123_456_789,
    save_s=0.25,
    state_bytes=400,
    files={"shared.json": FileEntry(2, "a3bb189e")},
    written_by=WrittenBy(job_id=7, restart_count=2, host="n1", argv=("train.py", "é")),
    meta={"loss": 1e-17, "note": "é\ud800"},
)


@pytest.mark.parametrize(
    "meta", [{"much": "x" * (5 << 20)}, {"deep": json.loads("[" * 195 + "]" * 195)}]
)
def test_no_manifest_is_written_that_is_not_read(meta: dict[str, object]) -> None:
    """What the caller adds has the limits of the reader: an unreadable commit is lost work."""
    with pytest.raises(UsageError, match="meta"):
        manifest.begun(step=1, epoch=0, kind="manual", meta=meta)


def test_every_byte_counts() -> None:
    """It comes back equal. A text with any one character left out or put in is refused, spaces too,
    and anything else is named as damaged."""
    text = ONE.to_json()
    assert Manifest.from_json(text, where=Path("m")) == ONE
    for at in range(len(text)):
        for other in (text[:at] + text[at + 1 :], text[:at] + " " + text[at:]):
            with pytest.raises((CheckpointCorrupt, CheckpointTooNew)):
                Manifest.from_json(other, where=Path("m"))
    for other in ("", "{}", "[]", "null", '{"checksum": "0", "schema": "x"}', "\x00"):
        with pytest.raises(CheckpointCorrupt, match=r"^here/manifest\.json"):
            Manifest.from_json(other, where=Path("here/manifest.json"))


def test_other_schemas() -> None:
    """A newer one is told with both versions, and what to install, whatever its checksum is; an
    older one with what can still read it. A damaged one is only damaged."""
    body = json.loads(ONE.to_json())
    body |= {"schema": manifest.SCHEMA + 1, "shards": {"of": "another age"}}
    body["written_by"]["hydroslurm"] = "9.1"
    edited = json.dumps(body, indent=1) + "\n"
    del body["checksum"]
    body["checksum"] = manifest.checksum((json.dumps(body, indent=1) + "\n").encode())
    wanted = re.escape(
        f"hydroslurm 9.1; hydroslurm {hydroslurm.__version__} reads up to schema {manifest.SCHEMA}"
    )
    for text in (edited, json.dumps(body, indent=1) + "\n"):
        with pytest.raises(CheckpointTooNew, match=wanted):
            Manifest.from_json(text, where=Path("m"))
    old = replace(ONE, schema=2).to_json()
    with pytest.raises(CheckpointTooOld, match=r"reads schema 3 and newer\. Finish the run with "):
        Manifest.from_json(old, where=Path("m"))
    with pytest.raises(CheckpointCorrupt):
        Manifest.from_json(old.replace('"step": 12', '"step": 13'), where=Path("m"))


def test_a_summary_is_small_whatever_the_number_of_files(tmp_path: Path) -> None:
    """The files are read from the disk."""
    files = {f"part-{rank:05}.json": FileEntry(10_000 + rank, "a3bb189e") for rank in range(5000)}
    whole = replace(ONE, files=files, world_size=5000)
    text = whole.summary().to_json()
    assert len(text) < 2000
    heard = as_told(text, tmp_path)
    assert (heard.step, heard.kind, heard.manifest.created_epoch_ns) == (
        (ONE.step, ONE.kind, ONE.created_epoch_ns)
    )
    (tmp_path / manifest.NAME).write_text(whole.to_json())
    assert read_again(heard, storage=Storage()) == whole


def test_a_manifest_that_is_seen_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system. None at all is a checkpoint that was never committed, and
    another one than was told of is refused."""
    heard = Checkpoint(tmp_path, ONE.summary())
    (tmp_path / manifest.NAME).write_text(replace(ONE, step=11).to_json())
    late = threading.Timer(0.2, (tmp_path / manifest.NAME).write_text, [ONE.to_json()])
    late.start()
    assert read_again(heard, storage=Storage()) == ONE
    late.join()
    monkeypatch.setattr(manifest, "VISIBLE_S", 0.1)
    (tmp_path / manifest.NAME).write_text(replace(ONE, save_s=9.0).to_json())
    for one in (heard, Checkpoint(tmp_path, ONE)):
        with pytest.raises(CheckpointCorrupt, match="is not the one that was there before"):
            read_again(one, storage=Storage())
    (tmp_path / manifest.NAME).unlink()
    with pytest.raises(CheckpointCorrupt, match="it was never committed"):
        read_again(heard, storage=Storage())

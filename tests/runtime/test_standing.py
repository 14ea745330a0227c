"""What a rank of a restarted generation says of where it stands."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from hydroslurm.coordination import collectives
from hydroslurm.core.rundir import GENERATION_ENV
from hydroslurm.runtime.standing import Watch

BELOW_AGENT = {GENERATION_ENV: "1"}
NOTHING = {
    "collectives": None,
    "collective_timeout_s": None,
    "meeting_timeout_s": None,
    "stands_at": "",
}


def test_a_rank_that_waits_for_the_others_says_so(tmp_path: Path) -> None:
    """As long as it is in init_process_group, with its time-out, and where the script called it."""
    watch, seen = Watch(BELOW_AGENT), []

    def look() -> None:
        while watch.look(None)["meeting_timeout_s"] is None:
            time.sleep(0.01)
        seen.append(watch.look(None))

    assert watch.look(None) == NOTHING
    thread = threading.Thread(target=look)
    thread.start()
    store = dist.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(RuntimeError):
        dist.init_process_group(
            "gloo", store=store, rank=0, world_size=2, timeout=timedelta(seconds=1.5)
        )
    thread.join()
    assert seen[0]["meeting_timeout_s"] == 1.5
    assert f"{Path(__file__).name}:" in seen[0]["stands_at"]
    assert watch.look(None)["meeting_timeout_s"] is None


def test_nobody_waits_in_a_group_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One who computes alone behind destroy_process_group may take its time."""
    progress: list[collectives.Progress | None] = [collectives.Progress("0#1", 7, 600.0), None]
    monkeypatch.setattr(collectives, "progress", lambda: progress.pop(0))
    watch = Watch(BELOW_AGENT)
    assert watch.look(3) == {**NOTHING, "collectives": 7, "collective_timeout_s": 600.0}
    assert watch.look(3) == NOTHING
    assert Watch({}).look(3) == {}

"""The site's settings, asked once for all of this user's processes on a node."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hydroslurm.slurm import scontrol_text
from hydroslurm.slurm.client import Config, SlurmClient
from hydroslurm.slurm.policies import LIFE_S, shared_policies
from hydroslurm.slurm.values import Job, JobState, Partition

RECORDED = Path(__file__).parent / "recorded/22.05"


class Site(SlurmClient):
    """Answers with recorded settings, and counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__({})
        self.asked = 0

    def config(self) -> Config:
        self.asked += 1
        return scontrol_text.read_config((RECORDED / "show_config.txt").read_text())

    def partitions(self) -> tuple[Partition, ...]:
        return scontrol_text.read_partitions((RECORDED / "show_partition.txt").read_text())


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    tmp_path.chmod(0o700)
    return {"XDG_RUNTIME_DIR": str(tmp_path), "SLURM_CLUSTER_NAME": "a"}


def test_one_asks_for_all(environ: dict[str, str]) -> None:
    """Also of those that start at the same moment, and each gets what Slurm said; another cluster's
    settings are others."""
    site = Site()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: shared_policies(site, environ), range(8)))
    assert site.asked == 1
    first = site.partitions()[0].name
    policies = {one.of(Job(job_id=1, state=JobState.RUNNING, partition=first)) for one in found}
    assert len(policies) == 1
    assert policies != {None}
    assert len({one.kill_after_s for one in found}) == 1
    shared_policies(site, {**environ, "SLURM_CLUSTER_NAME": "b"})
    assert site.asked == 2


def test_what_cannot_be_believed_is_asked_again(environ: dict[str, str], tmp_path: Path) -> None:
    """What is old, from the future, damaged, of another version, or for others to write."""
    site = Site()
    shared_policies(site, environ)
    (path,) = (tmp_path / "hydroslurm").glob("slurm-*.json")
    good = path.read_text()

    def asked(text: str, *, age_s: float = 0.0, mode: int = 0o600) -> bool:
        path.write_text(text)
        path.chmod(mode)
        now = path.stat().st_mtime
        os.utime(path, (now, now - age_s))
        before = site.asked
        shared_policies(site, environ)
        return site.asked > before

    assert not asked(good)
    assert asked(good, age_s=LIFE_S + 1)
    assert asked(good, age_s=-60)
    assert asked(good, mode=0o666)
    row = json.loads(good)
    spoiled = ({"v": 0}, {"partitions": [1]}, {"config": None}, {"partitions": [{"name": "low"}]})
    for change in spoiled:
        assert asked(json.dumps({**row, **change})), change
    for text in ("", "[]", "{", good[:-20]):
        assert asked(text), text

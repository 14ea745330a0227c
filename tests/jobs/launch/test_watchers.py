"""Two Slurms in one process: the job ids are the same numbers, the jobs are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydroslurm.jobs.launch.executor import PausableJob

SACCT = """#!/bin/sh
# A sacct of two clusters: job 1 has ended on the one whose configuration is called "old", and runs
# on every other one.
case "$SLURM_CONF" in
    */old/slurm.conf) state=COMPLETED ;;
    *) state=RUNNING ;;
esac
printf 'JobID|State|NodeList\\n1|%s|n1\\n' "$state"
"""


@pytest.fixture(autouse=True)
def _sacct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "sacct"
    program.write_text(SACCT)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")


def test_each_job_is_looked_up_in_its_own_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Job 1 of the new cluster runs, although job 1 of the old one has ended, and the old one's
    has ended, although ``SLURM_CONF`` names the new cluster by now."""
    jobs = {}
    for name in ("old", "new"):
        monkeypatch.setenv("SLURM_CONF", str(tmp_path / name / "slurm.conf"))
        jobs[name] = PausableJob(folder=tmp_path / name, job_id="1")
        assert jobs[name].state == ("COMPLETED" if name == "old" else "RUNNING")
    assert jobs["old"].watcher.is_done("1")
    assert jobs["old"].state == "COMPLETED"
    assert not jobs["new"].watcher.is_done("1")


def test_jobs_of_one_slurm_share_their_watcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sacct asks for all of them, as with submitit; also where no configuration is named."""
    for conf in (str(tmp_path / "slurm.conf"), None):
        if conf is None:
            monkeypatch.delenv("SLURM_CONF")
        else:
            monkeypatch.setenv("SLURM_CONF", conf)
        one, two = (PausableJob(folder=tmp_path, job_id=number) for number in "12")
        assert one.watcher is two.watcher

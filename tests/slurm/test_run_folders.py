"""Whose a default run folder is."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hydroslurm.core.rundir import RunDir, comment_for
from hydroslurm.slurm import run_folders
from hydroslurm.slurm.values import Job, JobState


class Site:
    """A cluster's job 7 in one folder, and what slurmctld would say of it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.answer = run_folders._Answer(problem="no Slurm here")
        self.asked = 0
        monkeypatch.setattr(run_folders, "_found", {})
        monkeypatch.setattr(run_folders, "_ask", self._ask)

    def _ask(self, *_: object) -> run_folders._Answer:
        self.asked += 1
        return self.answer

    def name(self, *, port: int = 1, restart: int = 0, cluster: str = "a", rank: int = 0) -> str:
        """The folder of one rank."""
        environ = {
            "SLURM_JOB_ID": "7",
            "SLURM_SUBMIT_DIR": str(self.folder),
            "SLURM_CLUSTER_NAME": cluster,
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
            "SLURM_SRUN_COMM_PORT": str(port),
            **({"SLURM_RESTART_COUNT": str(restart)} if restart else {}),
        }
        run_folders._found.clear()  # as another process
        found = run_folders.from_environment(environ)
        assert found is not None
        assert found.root.parent == self.folder / "hydroslurm-runs"
        return found.root.name


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def test_the_ranks_of_a_job_step_share_a_folder_and_ask_nobody(site: Site) -> None:
    """The first one makes it, and the others know it by their srun."""
    assert {site.name(rank=rank) for rank in range(5)} == {"7"}
    assert site.asked == 0


def test_a_first_attempt_takes_no_folder_of_a_job_before_it(site: Site) -> None:
    """Where the job has started after the folder was made, it gets the next one, with one line;
    every rank of it finds that one, and so does its restart."""
    site.name()
    site.answer = run_folders._Answer(start_epoch_s=int(time.time()) + 60)
    with pytest.warns(RuntimeWarning, match=r"another job 7 has begun at .* is .*/7-2"):
        assert site.name(port=2) == "7-2"
    assert [site.name(port=2, rank=rank) for rank in (0, 1)] == ["7-2", "7-2"]
    assert site.asked == 1
    assert site.name(port=3, restart=1) == "7-2"


def test_who_takes_a_new_folder_says_so_whoever_made_it(site: Site) -> None:
    """One rank can have made the folder, and another one be first to write into it."""
    site.name()
    RunDir(site.folder / "hydroslurm-runs" / "7-2").claim()
    with pytest.warns(RuntimeWarning, match="another job 7 has begun"):
        assert site.name(port=2, rank=1) == "7-2"


def test_a_later_job_step_goes_on(site: Site) -> None:
    """The same where the job had started before the folder was made; its first rank asks alone."""
    site.name()
    site.answer = run_folders._Answer(start_epoch_s=int(time.time()) - 60)
    assert [site.name(port=2, rank=rank) for rank in (0, 1, 2)] == ["7"] * 3
    assert site.asked == 1


def test_a_restart_whose_count_is_lost_goes_on(site: Site) -> None:
    """srun --export=NONE takes the variable away; slurmctld knows the count."""
    site.name()
    site.answer = run_folders._Answer(restart_count=1, start_epoch_s=int(time.time()) + 60)
    assert site.name(port=2) == "7"


def test_clusters_with_names_of_their_own_are_told_apart_without_a_question(site: Site) -> None:
    """Each one's job finds its own folder again, whichever was made last."""
    site.name()
    with pytest.warns(RuntimeWarning, match="is not used"):
        assert site.name(port=2, cluster="b") == "7-2"
    assert site.name(port=3, restart=1) == "7"
    assert site.name(port=3, restart=1, cluster="b") == "7-2"
    assert site.asked == 0


def test_where_slurm_cannot_be_asked_a_job_goes_on_and_says_so(site: Site) -> None:
    """A second srun in a container without Slurm's programs is not cut off from the first."""
    site.name()
    with pytest.warns(RuntimeWarning, match="no Slurm here"):
        assert site.name(port=2) == "7"


def test_ranks_that_come_together_take_one_folder(site: Site) -> None:
    """One of many makes it, also where a batch script had made it for its logs."""
    (site.folder / "hydroslurm-runs" / "7" / "logs").mkdir(parents=True)
    run = RunDir(site.folder / "hydroslurm-runs" / "7")
    run.root.parent.chmod(0o755)
    me = run_folders.Owner.from_environ({"SLURM_STEP_ID": "0"}, 7)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: run_folders._make(run, me), range(8)))
    assert sum(one is not None for one in made) == 1
    assert sorted(path.name for path in run.root.iterdir()) == ["job.jsonl", "logs"]


def test_a_folder_of_an_earlier_version_belongs_to_a_restart_only(site: Site) -> None:
    """One without job.jsonl: a restarted job goes on there, a new one does not obey its marker."""
    run = RunDir(site.folder / "hydroslurm-runs" / "7").create()
    run.finished_json.write_text("{}")
    for path in (run.finished_json, run.events):
        os.utime(path, (1.0, 1.0))
    assert site.name(restart=1) == "7"
    site.answer = run_folders._Answer(start_epoch_s=int(time.time()))
    with pytest.warns(RuntimeWarning, match="another job has begun there"):
        assert site.name() == "7-2"


def test_who_looks_for_a_job_finds_the_folder_of_this_one(site: Site) -> None:
    """By when it was made; the next one of a job that has made none; a named one by its name."""
    site.name()
    job = Job(
        job_id=7,
        state=JobState.RUNNING,
        work_dir=str(site.folder),
        start_epoch_s=int(time.time()) - 60,
    )
    later = int(time.time()) + 60

    def found(**changes: object) -> str:
        return run_folders.of_job(Job(**{**vars(job), **changes})).root.name

    assert found() == "7"
    assert found(start_epoch_s=later) == "7-2"
    assert found(start_epoch_s=later, restart_count=1) == "7"
    assert found(comment=comment_for(RunDir(Path("/runs/mine")))) == "mine"
    assert found(job_id=8) == "8"

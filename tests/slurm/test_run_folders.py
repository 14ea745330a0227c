"""Whose a default run folder is."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hydroslurm.core.command import Command
from hydroslurm.core.events import Event, EventKind, EventLog, clocks
from hydroslurm.core.rundir import RunDir, comment_for
from hydroslurm.core.status import NEVER, Moment, RankStatus
from hydroslurm.errors import ControllerUnreachable, RunFolderError
from hydroslurm.slurm import run_folders
from hydroslurm.slurm.values import Job, JobState


def _now() -> int:
    return int(time.time())


class Site:
    """A cluster's job 7 in one folder, and what slurmctld would say of it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.answer: Job | None = None
        self.asked = 0
        self.words = ["train.py"]
        self.living: set[str] = set()
        monkeypatch.setattr(run_folders, "_ask", self._ask)
        monkeypatch.setattr(run_folders, "_chosen", {})
        monkeypatch.setattr(run_folders, "_step_lives", lambda _, step, __: step in self.living)
        monkeypatch.setattr(Command, "of_this_process", lambda: Command.of(self.words))
        monkeypatch.setattr(run_folders, "_APPEAR_S", 0.05)

    def starts(self, in_s: int, *, restart_count: int = 0) -> None:
        """What slurmctld answers."""
        begin = {"start_epoch_s": _now() + in_s, "restart_count": restart_count}
        self.answer = Job(job_id=7, state=JobState.RUNNING, **begin)

    def _ask(self, *_: object) -> Job:
        self.asked += 1
        if self.answer is None:
            raise ControllerUnreachable("no Slurm here")
        return self.answer

    def name(
        self,
        *,
        port: int = 1,
        restart: int = 0,
        cluster: str = "a",
        rank: int = 0,
        start_in_s: int | None = None,
        step: str = "0",
        line: str = "train.py",
        **variables: str,
    ) -> str:
        """The folder of one rank."""
        start = {} if start_in_s is None else {"SLURM_JOB_START_TIME": str(_now() + start_in_s)}
        self.words = line.split()
        environ = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "train",
            "SLURM_SUBMIT_DIR": str(self.folder),
            "SLURM_CLUSTER_NAME": cluster,
            "SLURM_STEP_ID": step,
            "SLURM_PROCID": str(rank),
            "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
            "SLURM_SRUN_COMM_PORT": str(port),
            **({"SLURM_RESTART_COUNT": str(restart)} if restart else {}),
            **start,
            **variables,
        }
        run_folders._chosen.clear()  # as another process
        found = run_folders.from_environment(environ)
        assert found is not None
        assert found.root.parent == self.folder / "hydroslurm-runs"
        return found.root.name


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def test_a_first_attempt_takes_no_folder_of_a_job_before_it(site: Site) -> None:
    """The first rank makes it, and the others know it by their srun, without a question. A job that
    has started after the folder was made is refused, with the remedy: by what slurmctld says, which
    is asked once in a process, or by the environment."""
    assert {site.name(rank=rank) for rank in range(5)} == {"7"}
    assert site.asked == 0
    site.starts(60)
    with pytest.raises(RunFolderError, match=r"another job 7 \(train\), made at .*RUN_DIR or Run"):
        site.name(port=2)
    assert site.asked == 1
    with pytest.raises(RunFolderError, match="another job 7"):
        site.name(port=2, rank=1, start_in_s=60)
    assert site.asked == 1


def test_a_later_job_step_or_start_continues(site: Site) -> None:
    """The same where the job had started before the folder was made; only its first rank asks, and
    nobody where the environment has the start. A restart finds its folder by its count; srun
    --export=NONE takes the variable away, and slurmctld knows it."""
    site.name()
    site.starts(-60)
    assert [site.name(port=2, rank=rank) for rank in (0, 1, 2)] == ["7"] * 3
    assert site.asked == 1
    assert site.name(port=2, start_in_s=-60) == "7"
    assert site.name(port=2, restart=1, start_in_s=60) == "7"
    assert site.asked == 1
    site.starts(60, restart_count=1)
    assert site.name(port=3) == "7"


def test_another_cluster_is_refused_without_a_question(site: Site) -> None:
    """Also its restarts; those of the cluster that made the folder continue."""
    site.name()
    for restart in (0, 1):
        with pytest.raises(RunFolderError, match="on cluster a"):
            site.name(port=2, cluster="b", restart=restart)
    assert site.name(port=3, restart=1) == "7"
    assert site.asked == 0


def test_where_slurm_cannot_be_asked_a_job_continues_and_says_so(site: Site) -> None:
    """A second srun in a container without Slurm's programs is not cut off from the first."""
    site.name()
    with pytest.warns(RuntimeWarning, match="no Slurm here"):
        assert site.name(port=2) == "7"


@pytest.mark.parametrize("text", ["", "[]", json.dumps({"cluster": 1})])
def test_a_file_that_says_nothing_refuses_nobody(site: Site, text: str) -> None:
    """A disk that was full when it was written, for example."""
    run = RunDir(site.folder / "hydroslurm-runs" / "7").create()
    run.job_json.write_text(text)
    assert run_folders.read_owner(run) is None
    assert site.name() == "7"


def test_who_looks_for_a_job_finds_no_folder_of_an_earlier_one(site: Site) -> None:
    """By when it was made; a named one by its name."""
    site.name()

    def found(in_s: int = -60, job_id: int = 7, **more: Any) -> RunDir:
        job = Job(job_id=job_id, state=JobState.RUNNING, work_dir=str(site.folder), **more)
        return run_folders.of_job(replace(job, start_epoch_s=_now() + in_s))

    assert found().root.name == "7"
    assert not found(60).root.exists()
    assert found(60, restart_count=1).root.name == "7"
    assert found(comment=comment_for(RunDir(Path("/runs/mine")))).root.name == "mine"
    assert found(job_id=8).root.name == "8"


def test_each_line_of_a_job_finds_its_folder_again(site: Site) -> None:
    """Whatever the order of the job steps and the lines that come for the first time, and although
    ranks, hosts, dates and what to resume from are other ones in each start."""
    rank = "torch.py --node_rank {} --master_addr={} --name run-{}"
    first = [
        site.name(step="0", line="pretrain.py"),
        site.name(step="1", line="train.py --lr 0.1"),
        site.name(step="2", line="train.py --lr 0.2"),
        site.name(step="3", line=rank.format(0, "n1", "20261126-1930")),
        site.name(step="3", rank=1, line=rank.format(1, "n1", "20261126-1930")),
        site.name(step="", line="train.py --lr 0.2", HYDROSLURM_ALONE="0"),
    ]
    assert first == ["7", "7.2", "7.3", "7.4", "7.4", "7.5"]
    again = [
        site.name(restart=1, step="0", line="train.py --lr 0.3"),
        site.name(restart=1, step="1", line="train.py --lr 0.2"),
        site.name(restart=1, step="2", line="train.py --lr 0.1 --resume last.pt"),
        site.name(restart=1, step="3", line=rank.format(0, "n2", "20261127-0100")),
        site.name(restart=1, step="4", line="pretrain.py"),
    ]
    assert again == ["7.6", "7.3", "7.2", "7.4", "7"]
    with pytest.warns(RuntimeWarning, match="no start of this job before this one had this"):
        run_folders.warn_of_doubt(RunDir(site.folder / "hydroslurm-runs" / "7.6"))


def test_a_line_that_runs_several_times(site: Site) -> None:
    """Side by side, or after the last has finished, each has a folder of its own; one after an end
    that is none has the same, and so has torchrun's restart."""
    site.starts(-60)
    assert site.name(step="0") == "7"
    site.living = {"0"}
    assert site.name(step="1") == "7.2"
    with pytest.warns(RuntimeWarning, match="runs several times at once"):
        run_folders.warn_of_doubt(RunDir(site.folder / "hydroslurm-runs" / "7.2"))
    assert site.name(step="1", rank=1) == "7.2"
    site.living = set()
    assert site.name(step="2", rank=0) == "7", "a retry"
    folder = site.folder / "hydroslurm-runs"
    (folder / "7" / "finished.json").touch()
    assert site.name(step="2", TORCHELASTIC_RESTART_COUNT="1") == "7"
    assert site.name(step="3") == "7.2"
    (folder / "7.2" / "finished.json").touch()
    assert site.name(step="3") == "7.3", "the same step once more"
    (folder / "7.3" / "finished.json").touch()
    batch = [site.name(step=step, SLURM_NTASKS="2") for step in ("4294967291", "-5", "")]
    assert batch == ["7.4"] * 3, "no step of srun's"
    (folder / "7.4" / "finished.json").touch()
    assert site.name(step="-5", SLURM_NTASKS="2") == "7.5"
    assert [site.name(restart=1, step=str(step)) for step in range(3)] == ["7", "7.2", "7.3"]


def test_tasks_that_train_alone_have_a_folder_each(site: Site) -> None:
    """The same one in each start; without HYDROSLURM_ALONE they share one."""
    alone = [site.name(rank=rank, HYDROSLURM_ALONE="1") for rank in (1, 0, 2)]
    assert alone == ["7", "7.2", "7.3"]
    again = [site.name(restart=1, rank=rank, HYDROSLURM_ALONE="1") for rank in (0, 1, 2)]
    assert again == ["7.2", "7", "7.3"]


def test_job_steps_that_come_together_share_nothing(site: Site) -> None:
    """Forty ranks of ten lines at once: one folder a line, in each start; also where a batch script
    had made one for its logs."""
    environ = {"SLURM_CLUSTER_NAME": "a", "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "0"}

    def choose(line: int, rank: int, restart: int) -> str:
        step = {**environ, "SLURM_STEP_ID": str((line + restart) % 10), "SLURM_PROCID": str(rank)}
        step["SLURM_RESTART_COUNT"] = str(restart)
        command = Command.of(["train.py", f"--lr={line}"])
        me = replace(
            run_folders.Owner.from_environ(step, 7), exact=command.exact, stable=command.stable
        )
        assert run_folders._refusal(base, me, step) is None
        return run_folders._choose(base, me, step).root.name

    base = RunDir(site.folder / "hydroslurm-runs" / "7")
    (base.root / "logs").mkdir(parents=True)
    base.root.parent.chmod(0o755)
    lines = [(line, rank) for rank in range(4) for line in range(10)]
    seen: list[dict[int, set[str]]] = []
    with ThreadPoolExecutor(40) as pool:
        for restart in (1, 2):
            names = pool.map(lambda one, restart=restart: choose(*one, restart), lines)
            seen.append({line: set() for line in range(10)})
            for (line, _), name in zip(lines, names, strict=True):
                seen[-1][line].add(name)
    assert seen[0] == seen[1]
    assert sorted(map(len, seen[0].values())) == [1] * 10
    assert len(set.union(*seen[0].values())) == 10


@pytest.mark.parametrize(
    ("change", "asked", "waits"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"state": "ended"}, False, False),
        ({"finished": True}, False, False),
        ({"saver": ""}, False, False),
        ({"restart_count": 1}, False, False),
        ({"age_s": 40}, False, False),
        ({"age_s": 40, "heartbeat_s": 60.0}, False, True),
    ],
)
def test_a_requeue_waits_for_whom_it_would_kill(
    tmp_path: Path, change: dict[str, Any], asked: bool, waits: bool
) -> None:
    """A training of this start that lives, saves by itself, and has not asked for the requeue."""
    run = RunDir(tmp_path).create()
    given = {"state": "stopping", "saver": "attempt_began", **change}
    as_of = Moment(1, time.time_ns() - given.pop("age_s", 0) * 10**9)
    run.rank_status(0).write_text(RankStatus(0, since=NEVER, as_of=as_of, **given).to_json())
    if asked:
        EventLog(run.rank_events(0)).append(Event(EventKind.REQUEUE_ASKED, *clocks()))
    assert run_folders._is_at_work(run, 0) is waits

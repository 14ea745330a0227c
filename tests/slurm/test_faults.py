"""Slurm's programs fail in all the ways they do; shell scripts of their names on PATH play them:
they append their arguments to ``calls`` and say what Slurm 22.05.8 said, with its exit statuses."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hydroslurm.core.jobid import JobId
from hydroslurm.errors import (
    ControllerUnreachable,
    NoSuchJob,
    NotPermitted,
    SlurmError,
    SlurmMissing,
    SlurmTimeout,
    UnreadableOutput,
    UsageError,
    WrongJobState,
)
from hydroslurm.slurm import config
from hydroslurm.slurm.client import Job, JobState, SlurmClient
from hydroslurm.slurm.programs import RetryPolicy, sbatch

RECORDED = Path(__file__).parent / "recorded"
KILL = "scancel: error: Kill job error on job id"
AWAY = "Unable to contact slurm controller (connect failure)"


class Stage:
    """A folder of stand-ins, a client that finds only them, and a clock that no one waits for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.slept_s: list[float] = []
        self._now_s = 0.0
        (root / "bin").mkdir()

    def stand_in(self, program: str, script: str, *, from_call: int = 1) -> None:
        """``from_call``: which call is the first to go beyond this line of the script."""
        path = self.root / "bin" / program
        script = script.replace("@later", f'[ $(wc -l < "{self.root}/calls") -ge {from_call} ] &&')
        path.write_text(f'#!/bin/sh\necho "{program} $*" >> "{self.root}/calls"\n{script}\n')
        path.chmod(0o755)

    def refuses(self, program: str, words: str, *, status: int = 1) -> None:
        self.stand_in(program, f'echo "{words}" >&2; exit {status}')

    def client(self, *, call_timeout_s: float = 20, **environ: str) -> SlurmClient:
        retry_policy = RetryPolicy(
            call_timeout_s=call_timeout_s,
            give_up_after_s=30,
            monotonic=lambda: self._now_s,
            sleep=self._sleep,
            uniform=lambda low, high: (low + high) / 2,
        )
        path = f"{self.root}/bin:{os.defpath}"
        return SlurmClient({"PATH": path, **environ}, retry_policy=retry_policy)

    def calls(self, program: str = "") -> list[str]:
        path = self.root / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(program)]

    def _sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self._now_s += seconds


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def _recorded(name: str) -> str:
    return f"cat {RECORDED / name}"


SHOW_JOB = _recorded("22.05/show_job.txt")


def job(job_id: int, state: JobState = JobState.RUNNING) -> Job:
    """As slurmctld has described it."""
    return Job(job_id=job_id, state=state)


def test_controller_away(stage: Stage) -> None:
    """A question is asked again, with growing pauses, until slurmctld is back; in the end it is an
    error that says how often and for how long it was tried."""
    away = f'echo "slurm_load_jobs error: {AWAY}" >&2; exit 1'
    stage.stand_in("scontrol", f"@later exec {SHOW_JOB}\n{away}", from_call=4)
    assert stage.client().job(12).state == "SUSPENDED"
    assert len(stage.calls()) == 4
    assert stage.slept_s == [0.375, 0.75, 1.5]
    stage.stand_in("scontrol", away)
    with pytest.raises(ControllerUnreachable, match=r"attempts: 8, in 26\.\d s"):
        stage.client().config()
    assert max(stage.slept_s) <= 10


def test_requeue_is_repeated_after_a_time_out(stage: Stage) -> None:
    """scontrol may look for an absent controller for longer than one call is given; a suspend,
    which is not harmless twice, is not repeated. The program that does not end is ended, and the
    error says that the outcome is not known."""
    pid_file = stage.root / "pid"
    hangs = f"echo $$ > {pid_file}; exec sleep 60"
    stage.stand_in("scontrol", f"@later exit 0\n{hangs}", from_call=2)
    client = stage.client(call_timeout_s=0.5)
    client.requeue(job(5))
    assert stage.calls() == ["scontrol requeue 5"] * 2
    (stage.root / "calls").unlink()
    with pytest.raises(SlurmTimeout, match=r"scontrol suspend 5: no answer within 0\.5 s"):
        client.suspend(job(5))
    assert stage.calls() == ["scontrol suspend 5"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.mark.parametrize(
    ("sentence", "n_calls"), [("(connect failure)", 8), ("(receive failure)", 1)]
)
def test_signal_is_not_sent_twice(stage: Stage, sentence: str, n_calls: int) -> None:
    """A signal is repeated only when the first one cannot have been heard."""
    words = f"Kill job error on job id 5: Unable to contact slurm controller {sentence}"
    stage.refuses("scancel", f"scancel: error: {words}", status=8)
    with pytest.raises(ControllerUnreachable):
        stage.client().signal(job(9), "USR1")
    assert stage.calls() == ["scancel --signal=10 9"] * n_calls


def test_a_complaint_with_status_0(stage: Stage) -> None:
    """What a program complains of on stderr counts, even when it exits with 0; a question that was
    answered stays answered, whatever a plugin complains of on the way."""
    stage.refuses("scancel", f"{KILL} 9: Invalid job id specified", status=0)
    with pytest.raises(NoSuchJob, match="scancel 9"):
        stage.client().cancel(job(9))
    answer = _recorded("22.05/show_config.txt")
    stage.stand_in("scontrol", f'echo "scontrol: error: plugin x is deprecated" >&2; {answer}')
    assert stage.client().config().cluster_name == "probe"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (f'echo "slurm_load_jobs error: {AWAY}" >&2; exit 1', ControllerUnreachable),
        ('echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1', NoSuchJob),
        (SHOW_JOB, SlurmError),
    ],
)
def test_a_sentence_that_says_nothing(stage: Stage, answer: str, error: type[SlurmError]) -> None:
    """ "Unexpected message received" stands for several causes; the right one is found out."""
    says = 'echo "Unexpected message received for job 9" >&2; exit 1'
    stage.stand_in("scontrol", f'case "$1" in show) {answer};; *) {says};; esac')
    with pytest.raises(SlurmError) as caught:
        stage.client().suspend(job(9))
    assert type(caught.value) is error
    assert stage.calls()[:2] == ["scontrol suspend 9", "scontrol show job 9"]


REFUSALS = {
    NotPermitted: [
        ("scontrol", "Access/permission denied for job 1", "suspend"),
        ("scontrol", "2_0-3: Invalid user id", "suspend"),
        ("scancel", f"{KILL} 1: Access/permission denied", "cancel"),
    ],
    WrongJobState: [
        ("scontrol", "Job is not suspended for job 1", "resume"),
        ("scontrol", "Only batch jobs are accepted or processed", "requeue"),
        ("scontrol", "Requested operation is presently disabled", "requeue"),
    ],
    SlurmError: [("scontrol", "slurm_suspend error: The moon is full", "suspend")],
}


@pytest.mark.parametrize(
    ("error", "program", "words", "act"),
    [(error, *row) for error, rows in REFUSALS.items() for row in rows],
)
def test_refusals(
    stage: Stage, error: type[SlurmError], program: str, words: str, act: str
) -> None:
    """Each of Slurm's sentences is the error that it means, and stands in the message."""
    stage.stand_in("scontrol", SHOW_JOB)
    stage.refuses(program, words)
    call: Callable[[Job], None] = getattr(stage.client(), act)
    with pytest.raises(SlurmError, match=words[-15:]) as caught:
        call(job(9))
    assert type(caught.value) is error
    assert len(stage.calls(program)) == 1


def test_garbage_answers(stage: Stage) -> None:
    """A program that prints something else is reported as such, with what it printed."""
    for program in ("scontrol", "squeue", "sacct"):
        stage.stand_in(program, "echo 'Welcome to the login node'")
    client = stage.client()
    for ask in (
        lambda: client.job(5),
        client.jobs,
        lambda: client.history(JobId(5)),
        client.config,
    ):
        with pytest.raises(UnreadableOutput, match="Welcome"):
            ask()


def test_without_json_scontrol_is_asked(stage: Stage) -> None:
    """A Slurm built without JSON, and the empty list of 22.05's errors, lead to scontrol."""
    stage.stand_in("scontrol", SHOW_JOB)
    for squeue in (
        "echo 'squeue: fatal: Unable to find json plugin' >&2; exit 1",
        _recorded("22.05/squeue_controller_away.json"),
    ):
        stage.stand_in("squeue", squeue)
        assert len(stage.client().jobs()) == 6


def test_jobs_are_chosen_from_one_answer(stage: Stage) -> None:
    """Users, ids and whole arrays are chosen from one request; no ids, no request."""
    stage.stand_in("squeue", _recorded("22.05/squeue.json"))
    client = stage.client()
    assert [j.job_id for j in client.jobs(ids=[JobId(12), JobId(10), JobId(4711)])] == [15, 12, 10]
    assert client.jobs(user="ada") == ()
    assert len(stage.calls()) == 2
    assert client.jobs(ids=[]) == ()
    assert len(stage.calls()) == 2


def test_the_environment_of_the_programs(stage: Stage) -> None:
    """The user's formatting and filters do not reach the programs; SLURM_CLUSTERS does."""
    stage.stand_in("scancel", f'env > "{stage.root}/env"')
    formats = {"SCANCEL_USER": "eve", "SQUEUE_FORMAT": "%i", "SLURM_TIME_FORMAT": "relative"}
    where = {"SLURM_CLUSTERS": "other", "SLURM_JOB_ID": "7"}
    stage.client(**formats, **where, LC_ALL="de_DE.UTF-8").cancel(job(9))
    lines = (stage.root / "env").read_text().splitlines()
    seen = dict(line.split("=", 1) for line in lines if "=" in line)
    assert not {"SCANCEL_USER", "SQUEUE_FORMAT"} & seen.keys()
    assert (seen["LC_ALL"], seen["SLURM_TIME_FORMAT"]) == ("C", "%s")
    assert where.items() <= seen.items()


NO_CONF = """\
scontrol: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
scontrol: error: fetch_config: DNS SRV lookup failed
scontrol: error: _establish_config_source: failed to fetch config
scontrol: fatal: Could not establish a configuration source
"""


def test_no_slurm_here(tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the programs, with a SLURM_CONF that is not there, or without any configuration the
    error says what to do, in one line; that of a submission, too."""
    script = f"cat >&2 <<'END'\n{NO_CONF}END\nexit 1"
    for program in ("scontrol", "sbatch"):
        stage.stand_in(program, script)
    monkeypatch.setattr(config, "_PLACES", (str(tmp_path / "slurm.conf"),))
    monkeypatch.setenv("PATH", f"{stage.root}/bin:{os.defpath}")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    asks = (stage.client().config, lambda: sbatch(tmp_path / "job.sh"))
    for ask in asks:
        with pytest.raises(SlurmMissing, match=r"^[^\n/]*Slurm is not configured on this machine"):
            ask()
    (tmp_path / "slurm.conf").touch()
    for ask in asks:
        with pytest.raises(SlurmMissing, match=f"export SLURM_CONF={tmp_path}/slurm.conf"):
            ask()
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "no.conf"))
    with pytest.raises(SlurmMissing, match="SLURM_CONF names"):
        sbatch(tmp_path / "job.sh")
    with pytest.raises(SlurmMissing, match="no program scontrol on PATH"):
        SlurmClient({"PATH": str(tmp_path)}).job(1)
    with pytest.raises(SlurmMissing, match="SLURM_CONF names"):
        SlurmClient({"PATH": os.defpath, "SLURM_CONF": str(tmp_path / "no.conf")}).job(1)


@pytest.mark.parametrize("job_id", [0, True, "5,6", "-a"])
def test_bad_ids_never_reach_a_command_line(stage: Stage, job_id: int) -> None:
    """What is no job id is the caller's mistake; no program is run."""
    client = stage.client()
    with pytest.raises(UsageError, match="not a job id"):
        client.job(job_id)
    assert stage.calls() == []


def test_signals_by_name_and_number(stage: Stage) -> None:
    """Names with and without SIG, numbers and members mean the same; others are refused. A
    suspended job gets SIGKILL, and only that."""
    stage.stand_in("scancel", "")
    client = stage.client()
    client.signal(job(9), "USR1")
    client.signal(job(9), "sigusr1", step=0)
    client.signal(job(9), signal.SIGUSR1)
    with pytest.raises(UsageError, match="'FOO' is not a signal"):
        client.signal(job(9), "FOO")
    client.signal(job(12, JobState.SUSPENDED), "KILL")
    sent = ["--signal=10 9", "--signal=10 9.0", "--signal=10 9", "--signal=9 12"]
    assert stage.calls() == [f"scancel {words}" for words in sent]

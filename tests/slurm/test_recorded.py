"""Recorded outputs of Slurm's programs are read: 22.05, and 25.11 as its source prints it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hydroslurm.errors import UnreadableOutput
from hydroslurm.slurm import listings, scontrol_text
from hydroslurm.slurm.config import Config
from hydroslurm.slurm.values import Job, JobState

RECORDED = Path(__file__).parent / "recorded"


def _text(name: str) -> str:
    return (RECORDED / name).read_text()


def _scontrol(name: str) -> dict[int, Job]:
    return {job.job_id: job for job in scontrol_text.read_jobs(_text(name))}


def _squeue(name: str) -> dict[int, Job]:
    return {job.job_id: job for job in listings.read_jobs(_text(name))}


def test_one_job_in_full() -> None:
    """Every field of a running job of two nodes is read, with "=" and spaces where they hurt."""
    assert _scontrol("22.05/show_job.txt")[9] == Job(
        job_id=9,
        state=JobState.RUNNING,
        flags=frozenset({"RUNNING"}),
        name="my job=1",
        user="root",
        partition="urgent",
        reason="None",
        nodes=("n1", "n2"),
        node_list="n[1-2]",
        n_nodes=2,
        n_tasks=2,
        n_cpus=2,
        submit_epoch_s=1795204654,
        eligible_epoch_s=1795204654,
        start_epoch_s=1795204659,
        end_epoch_s=1795298499,
        time_limit_s=93840,
        work_dir="/home/ada/w d",
        std_out="/home/ada/w d/out=9 x.log",
        std_err="/home/ada/w d/err my job=1-9.log",
        comment="hydroslurm:/home/ada/runs/a b=c StdOut=/not/this",
        exit_code=0,
        is_batch=True,
        may_requeue=True,
        qos="normal",
    )


def test_scontrol_and_squeue_agree() -> None:
    """The same eight jobs at the same moment, read from text and from JSON, are equal."""
    from_text, from_json = _scontrol("22.05/show_job.txt"), _squeue("22.05/squeue.json")
    assert len(from_text) == 8
    # text cannot hold a comment with newlines: its first line is kept, and nothing else is
    # disturbed
    assert from_text[13].comment == "two lines"
    assert from_json[13].comment == "two lines\n   StdOut=/evil\n\nJobId=999 JobName=evil"
    from_text[13] = replace(from_text[13], comment=from_json[13].comment)
    assert from_text == from_json


def test_states_of_the_recorded_jobs() -> None:
    """Running, suspended, completing (cancelled and requeued), failed, held, array: as recorded."""
    jobs = _squeue("22.05/squeue.json")
    assert {i: job.state.value for i, job in jobs.items()} == {
        9: "RUNNING",
        10: "PENDING",
        11: "COMPLETING",
        12: "SUSPENDED",
        13: "PENDING",
        14: "FAILED",
        15: "RUNNING",
        16: "COMPLETING",
    }
    assert jobs[12].suspend_epoch_s is not None
    assert jobs[14].exit_code == 15
    assert jobs[13].reason == "JobHeldUser"


def test_array_records() -> None:
    """A task has an id and a number; the record for tasks not started has the array's id."""
    jobs = _scontrol("22.05/show_job.txt")
    assert (jobs[10].array_job_id, jobs[10].array_task_id) == (10, None)
    assert (jobs[15].array_job_id, jobs[15].array_task_id) == (10, 0)
    assert jobs[15].std_out == "/home/ada/w d/slurm-10_0.out"


def test_local_time_is_read_too() -> None:
    """A scontrol that ignores SLURM_TIME_FORMAT still gives moments in the right order."""
    job = _scontrol("22.05/show_job_iso.txt")[9]
    assert job.submit_epoch_s
    assert job.start_epoch_s
    assert job.end_epoch_s
    assert job.start_epoch_s - job.submit_epoch_s == 5
    assert job.end_epoch_s - job.start_epoch_s == job.time_limit_s


def test_no_jobs() -> None:
    """An empty cluster has no jobs, in either form."""
    assert scontrol_text.read_jobs("No jobs in the system\n") == ()
    assert scontrol_text.read_jobs("") == ()
    assert listings.read_jobs('{"jobs": [], "errors": []}') == ()


def test_partitions() -> None:
    """Tier, preempt mode, grace and limits of both partitions are read."""
    low, urgent = scontrol_text.read_partitions(_text("22.05/show_partition.txt"))
    assert (low.name, low.priority_tier, low.preempt_mode) == ("low", 1, "SUSPEND")
    assert (low.grace_time_s, low.max_time_s, low.is_default) == (8, 3600, True)
    assert low.nodes == ("n1", "n2", "n3", "n4")
    assert (urgent.priority_tier, urgent.max_time_s, urgent.state) == (10, None, "UP")


def test_config() -> None:
    """The settings that matter to preemption are read, "(null)" being empty."""
    config = scontrol_text.read_config(_text("22.05/show_config.txt"))
    assert config.version == (22, 5, 8)
    assert config.cluster_name == "probe"
    assert config.preempt_mode == "GANG,SUSPEND"
    assert (config.kill_wait_s, config.cred_expire_s) == (5, 5)
    assert config.suspend_grace_time_s == 2
    assert config.proctrack_type == "proctrack/linuxproc"
    assert config["Prolog"] == ""
    assert config["SlurmctldHost[0]"] == "head(127.0.0.1)"


def test_config_defaults_and_newer_grace() -> None:
    """The suspend grace of 23.11 and later is read; without a setting Slurm's defaults hold."""
    assert Config({"PreemptParameters": "a=1,suspend_grace_time=7"}).suspend_grace_time_s == 7
    empty = Config({})
    assert (empty.suspend_grace_time_s, empty.kill_wait_s, empty.cred_expire_s) == (2, 30, 120)
    assert (empty.version, empty.preempt_mode) == ((0,), "OFF")
    with pytest.raises(TypeError):
        empty.entries["KillWait"] = "1"  # type: ignore[index]


def test_attempts_of_a_job() -> None:
    """Each requeue begins a new attempt, in order, and counts one restart more."""
    attempts = [j for j in listings.read_attempts(_text("22.05/sacct.txt")) if j.job_id == 1]
    assert [attempt.restart_count for attempt in attempts] == [0, 1]
    assert attempts[0].state is JobState.REQUEUED
    assert attempts[0].nodes == ("n2",)
    assert attempts[0].work_dir == "/home/ada/w d"


def test_exit_codes_have_one_meaning() -> None:
    """What ended with 143 reads 15 everywhere: sacct of 22.05 and pyslurm say no more, while sacct
    of 25.11, scontrol and squeue say 143."""
    (attempt,) = [j for j in listings.read_attempts(_text("22.05/sacct.txt")) if j.job_id == 2]
    newer = _text("22.05/sacct.txt").replace("\x1f15:0\x1f", "\x1f143:0\x1f")
    assert newer != _text("22.05/sacct.txt")
    (later,) = [j for j in listings.read_attempts(newer) if j.job_id == 2]
    told = [attempt, later, _scontrol("22.05/show_job.txt")[14], _squeue("22.05/squeue.json")[14]]
    assert [job.exit_code for job in told] == [15] * 4


def test_stderr_without_a_file_of_its_own() -> None:
    """It goes where stdout goes: 22.05 says so, 25.11 prints an empty StdErr."""
    text = _text("22.05/show_job.txt")
    newer = text.replace("StdErr=/home/ada/w d/slurm-11.out", "StdErr=")
    assert newer != text
    assert scontrol_text.read_jobs(newer) == scontrol_text.read_jobs(text)


def test_suspended_time() -> None:
    """Accounting adds up an attempt's suspends, here of 4 and of 3 s; without one it is 0."""
    attempts = listings.read_attempts(_text("22.05/sacct.txt"))
    suspended = {attempt.name: attempt.suspended_s for attempt in attempts}
    assert (suspended["parked"], suspended["again"]) == (7, 0)


def test_sacct_row_with_newline() -> None:
    """A newline in a comment, a name or a path does not tear a row."""
    row = _text("22.05/sacct.txt").splitlines()[0].split(listings.DELIMITER)
    row[listings.SACCT_FIELDS.index("Comment")] = "two\nlines"
    (attempt,) = listings.read_attempts(listings.DELIMITER.join(row) + "\n")
    assert attempt.comment == "two\nlines"


def test_newer_json() -> None:
    """Numbers as objects, states as lists and exit codes as objects give the same values."""
    jobs = _squeue("25.11/squeue_handmade.json")
    assert jobs[501].preempt_epoch_s == 1795204700
    assert (jobs[501].time_limit_s, jobs[501].memory_per_node_bytes) == (3600, 64000 * 2**20)
    assert jobs[502].state is JobState.COMPLETING
    assert "CANCELLED" in jobs[502].flags
    assert (jobs[503].time_limit_s, jobs[503].start_epoch_s) == (None, None)
    assert (jobs[503].array_job_id, jobs[503].array_task_id) == (503, None)
    assert (jobs[504].array_job_id, jobs[504].array_task_id) == (500, 0)
    assert jobs[504].state is JobState.SUSPENDED
    assert jobs[505].exit_code == 15
    assert (jobs[506].is_batch, jobs[506].may_requeue) == (False, False)


def test_newer_scontrol() -> None:
    """The newer lines (SLUID, SubmitLine, TRES) do not disturb, nor do free texts with "Key="."""
    (job,) = scontrol_text.read_jobs(_text("25.11/show_job_handmade.txt"))
    from_json = _squeue("25.11/squeue_handmade.json")[501]
    assert job.comment == "first line\n   Restarts=99 second line"
    assert replace(job, comment="") == from_json


@pytest.mark.parametrize(
    "garbage", ["", "Segmentation fault", "[]", '{"jobs": 5}', '{"jobs": [{"job_id": 1}]}', "{"]
)
def test_garbage_json_refused(garbage: str) -> None:
    """Whatever is not a list of jobs is refused with the text in the message."""
    with pytest.raises(UnreadableOutput):
        listings.read_jobs(garbage)


def test_json_with_errors_refused() -> None:
    """22.05 reports an absent controller as an empty list and an error: that is not "no jobs"."""
    with pytest.raises(UnreadableOutput, match="answered with errors"):
        listings.read_jobs(_text("22.05/squeue_controller_away.json"))


@pytest.mark.parametrize("garbage", ["hello", "JobId=x", "JobId=5 JobName=a\n   UserId=u(1)"])
def test_garbage_text_refused(garbage: str) -> None:
    """A record without what every job has is refused, and the message shows it."""
    with pytest.raises(UnreadableOutput, match=r"no job|this record"):
        scontrol_text.read_jobs(garbage)


def test_other_garbage_refused() -> None:
    """No configuration, a partition without a tier, a row cut short: refused."""
    with pytest.raises(UnreadableOutput, match="no configuration"):
        scontrol_text.read_config("Slurmctld(primary) at head is DOWN\n")
    with pytest.raises(UnreadableOutput, match="PriorityTier"):
        scontrol_text.read_partitions("PartitionName=low State=UP")
    with pytest.raises(UnreadableOutput, match="columns"):
        listings.read_attempts("1|2|3\n")

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


def test_scontrol_and_squeue_agree() -> None:
    """The same jobs at the same moment, read from text and from JSON, are equal."""
    from_text, all_jobs = _scontrol("22.05/show_job.txt"), _squeue("22.05/squeue.json")
    from_json = {job_id: all_jobs[job_id] for job_id in from_text}
    assert len(from_text) == 6
    # text cannot hold a comment with newlines: its first line is kept, and nothing else is
    # disturbed
    assert from_text[13].comment == "two lines"
    assert from_json[13].comment == "two lines\n   StdOut=/evil\n\nJobId=999 JobName=evil"
    from_text[13] = replace(from_text[13], comment=from_json[13].comment)
    assert from_text == from_json


def test_the_recorded_jobs() -> None:
    """Running, suspended, completing (cancelled and requeued), failed, held, array: as recorded. A
    task has an id and a number; the record for tasks not started has the array's id. "=" and spaces
    stand where they hurt."""
    jobs = _squeue("22.05/squeue.json")
    states = "RUNNING PENDING COMPLETING SUSPENDED PENDING FAILED RUNNING COMPLETING"
    assert [jobs[i].state.value for i in range(9, 17)] == states.split()
    assert jobs[12].suspend_epoch_s is not None
    assert jobs[13].reason == "JobHeldUser"
    assert (jobs[10].array_job_id, jobs[10].array_task_id) == (10, None)
    assert (jobs[15].array_job_id, jobs[15].array_task_id) == (10, 0)
    one = jobs[9]
    assert (one.name, one.user, one.node_list) == ("my job=1", "root", "n[1-2]")
    assert (one.time_limit_s, one.end_epoch_s) == (93840, 1795298499)
    assert one.comment == "hydroslurm:/home/ada/runs/a b=c StdOut=/not/this"
    assert one.std_err == "/home/ada/w d/err my job=1-9.log"


def test_partitions() -> None:
    """Tier, preempt mode, grace and limits of both partitions are read."""
    low, urgent = scontrol_text.read_partitions(_text("22.05/show_partition.txt"))
    assert (low.name, low.priority_tier, low.preempt_mode) == ("low", 1, "SUSPEND")
    assert (low.grace_time_s, low.max_time_s, low.is_default) == (8, 3600, True)
    assert low.nodes == ("n1", "n2", "n3", "n4")
    assert (urgent.priority_tier, urgent.max_time_s, urgent.state) == (10, None, "UP")


def test_config() -> None:
    """The settings that matter to preemption are read, "(null)" being empty; the suspend grace of
    23.11 and later, too, and without a setting Slurm's defaults hold."""
    config = scontrol_text.read_config(_text("22.05/show_config.txt"))
    assert config.version == (22, 5, 8)
    assert config.cluster_name == "probe"
    assert config.preempt_mode == "GANG,SUSPEND"
    assert (config.kill_wait_s, config.cred_expire_s) == (5, 5)
    assert config.suspend_grace_time_s == 2
    assert config.proctrack_type == "proctrack/linuxproc"
    assert config["Prolog"] == ""
    assert config["SlurmctldHost[0]"] == "head(127.0.0.1)"
    assert Config({"PreemptParameters": "a=1,suspend_grace_time=7"}).suspend_grace_time_s == 7
    empty = Config({})
    assert (empty.suspend_grace_time_s, empty.kill_wait_s, empty.cred_expire_s) == (2, 30, 120)
    assert (empty.version, empty.preempt_mode) == ((0,), "OFF")


def test_attempts_of_a_job() -> None:
    """Each requeue begins a new attempt, in order, and counts one restart more. Accounting adds up
    an attempt's suspends, here of 4 and of 3 s. A newline in a comment does not tear a row."""
    text = _text("22.05/sacct.txt")
    recorded = listings.read_attempts(text)
    attempts = [attempt for attempt in recorded if attempt.job_id == 1]
    assert [attempt.restart_count for attempt in attempts] == [0, 1]
    assert attempts[0].state is JobState.REQUEUED
    assert (attempts[0].nodes, attempts[0].work_dir) == (("n2",), "/home/ada/w d")
    suspended = {attempt.name: attempt.suspended_s for attempt in recorded}
    assert (suspended["parked"], suspended["again"]) == (7, 0)
    row = text.splitlines()[0].split(listings.DELIMITER)
    row[listings.SACCT_FIELDS.index("Comment")] = "two\nlines"
    (attempt,) = listings.read_attempts(listings.DELIMITER.join(row) + "\n")
    assert attempt.comment == "two\nlines"


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
    newer = text.replace("StdErr=/home/ada/w d/slurm-12.out", "StdErr=")
    assert newer != text
    assert scontrol_text.read_jobs(newer) == scontrol_text.read_jobs(text)


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


JSON = ("", "Segmentation fault", '{"jobs": 5}', '{"jobs": [{"job_id": 1}]}')
REFUSED = {
    listings.read_jobs: (*JSON, _text("22.05/squeue_controller_away.json")),
    scontrol_text.read_jobs: ("hello", "JobId=5 JobName=a\n   UserId=u(1)"),
    scontrol_text.read_config: ("Slurmctld(primary) at head is DOWN\n",),
    scontrol_text.read_partitions: ("PartitionName=low State=UP",),
    listings.read_attempts: ("1|2|3\n",),
}


@pytest.mark.parametrize(
    ("read", "output"), [(read, output) for read, all_of in REFUSED.items() for output in all_of]
)
def test_garbage_is_refused(read, output: str) -> None:
    """Whatever is not such a list, and a record without what every record has. 22.05 reports an
    absent controller as an empty list and an error: that is not "no jobs", which there may be."""
    with pytest.raises(UnreadableOutput):
        read(output)
    assert scontrol_text.read_jobs("No jobs in the system\n") == ()
    assert scontrol_text.read_jobs("") == ()
    assert listings.read_jobs('{"jobs": [], "errors": []}') == ()

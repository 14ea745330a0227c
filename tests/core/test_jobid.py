"""Names of jobs: read strictly, printed as Slurm prints them, and what two of them share."""

from __future__ import annotations

import pytest

from hydroslurm.core.jobid import JobId
from hydroslurm.errors import UsageError
from hydroslurm.slurm.values import Job, JobState


@pytest.mark.parametrize(
    ("text", "argument", "leader"),
    [
        ("44", "44", "44"),
        ("44_0", "44_0", "44_0"),
        ("44_[1-3,7-11:2%1]", "44_[1-3,7-11:2]", "44_[1-3,7-11:2]"),
        ("44+0", "44", "44"),
        ("44+1", "44+1", "44"),
    ],
)
def test_what_is_read_is_printed(text: str, argument: str, leader: str) -> None:
    """As Slurm prints it, and as its programs take it."""
    job_id = JobId.parse(text)
    assert (str(job_id), job_id.argument, job_id.leader) == (text, argument, leader)


@pytest.mark.parametrize(
    "text",
    ["", " 44", "44 ", "44\n", "+44", "-44", "0", "044", "4__8", "44_", "44_03", "44_3_1", "44+1_2",
     "44.0", "1e3", "0x2c", "٤٤", "4²", "44,45", "44_[]", "44_[3-]", "44_[1-3", "44_[1-3]%1", "all",
     "44_[*]", "99999999999"],
)  # fmt: skip
def test_what_is_no_id_is_refused(text: str) -> None:
    """Python's int() takes underscores, signs, spaces and other digits: 44_3 is not job 443."""
    with pytest.raises(UsageError, match="wanted one as Slurm prints it: 44, 44_3"):
        JobId.parse(text)


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("44", ["44_1", "44_[2-9%1]"]),
        ("45", ["44_1"]),
        ("44_1", ["44_1"]),
        ("44_8", ["44_[2-9%1]"]),
        ("44_[0-1]", ["44_1"]),
        ("44_[9,12]", ["44_[2-9%1]"]),
        ("44_10", []),
        ("50", ["50+0", "50+1"]),
        ("51", ["50+1"]),
        ("50+1", ["50+1"]),
        ("50_1", []),
    ],
)
def test_which_jobs_an_id_means(asked: str, names: list[str]) -> None:
    """A number is a job's own, its array's or its leader's; an element may be one of those that
    wait together."""
    jobs = [
        Job(job_id=45, state=JobState.RUNNING, array_job_id=44, array_task_id=1),
        Job(job_id=44, state=JobState.PENDING, array_job_id=44, array_tasks="2-9%1"),
        Job(job_id=50, state=JobState.RUNNING, het_job_id=50, het_component=0),
        Job(job_id=51, state=JobState.RUNNING, het_job_id=50, het_component=1),
    ]
    assert [str(job.id) for job in jobs if job.is_named(JobId.parse(asked))] == names
    # 26.05 prints the last element that waits as a set of one, with the array's throttle
    last = Job(job_id=44, state=JobState.PENDING, array_job_id=44, array_tasks="2%1")
    assert last.id == JobId.parse("44_2")


def test_what_two_ids_share() -> None:
    """Elements of one array; nothing of two."""
    some = JobId.parse("44_[1-9:2%1]")
    assert some.common(JobId.parse("44_[2-5]")) == JobId.parse("44_[3,5]")
    assert some.common(JobId.parse("44_[5-6]")) == JobId.parse("44_5")
    assert some.common(JobId.parse("44_4")) is some.common(JobId.parse("45_3")) is None

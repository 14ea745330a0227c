"""The mapping from pyslurm's objects, **against a stand-in** with the attributes, units and quirks
of pyslurm 25.11.2's source: pyslurm compiles only against the one release of Slurm that it is made
for. Where it is installed, test_contract runs against the real one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hydroslurm.core.jobid import JobId
from hydroslurm.errors import NoSuchJob, NotPermitted, SlurmError, SlurmMissing, WrongJobState
from hydroslurm.slurm import libslurm, listings
from hydroslurm.slurm.client import SlurmClient
from hydroslurm.slurm.libslurm import Libslurm
from hydroslurm.slurm.values import Job, JobState

RECORDED = Path(__file__).parent / "recorded"

JOB: dict[str, Any] = {
    "id": 501, "name": "train", "user_name": "ada", "partition": "low", "qos": "normal",
    "state": "RUNNING", "state_reason": "None", "exit_code": 0, "requeue_count": 2,
    "is_batch_job": True, "is_requeueable": True,
    "array_id": None, "array_task_id": None, "array_tasks_waiting": None,
    "allocated_nodes": "gpu[08-09]", "excluded_nodes": None, "num_nodes": 2, "ntasks": 8, "cpus": 8,
    "memory_per_node": 64000, "memory_per_cpu": None, "gres_per_node": {"gpu": 1},
    "submit_time": 1795204650, "eligible_time": 1795204654, "start_time": 1795204659,
    "end_time": 1795208259, "preempt_time": 1795204700, "suspend_time": None,
    "time_limit": 60,  # minutes
    "working_directory": "/home/ada", "comment": None,
    "standard_output": "/home/ada/train-501.out", "standard_error": "/home/ada/train-501.out",
}  # fmt: skip
CONFIG = SimpleNamespace(
    accounting_storage_type="accounting_storage/slurmdbd", cluster_name="c", version="25.11.7",
    auth_info=["socket=/x", "cred_expire=5"], mpi_default="none", message_timeout=10,
    cgroup_config=SimpleNamespace(signal_children_processes=False), kill_wait_time=30,
    job_file_append=True, job_requeue=True, max_batch_requeue=5, requeue_exit=None,
    over_time_limit=2, preempt_exempt_time=1800, preempt_mode="GANG,SUSPEND",
    preempt_parameters={"suspend_grace_time": 7, "youngest_first": True},
    preempt_type="preempt/partition_prio", proctrack_type="proctrack/cgroup",
    scheduler_parameters={"requeue_delay": 9, "bf_continue": True}, slurmctld_parameters=None,
)  # fmt: skip
LOW = SimpleNamespace(
    name="low", state="UP", priority_tier=1, preempt_mode="SUSPEND", preemption_grace_time=None,
    nodes="gpu[08-09]", max_time="UNLIMITED", is_default=True,
)  # fmt: skip


class RPCError(Exception):
    """Stands in for pyslurm.RPCError: str() is the sentence of slurm_strerror."""


class StandIn:
    """Stands in for the module pyslurm, with one job in it."""

    RPCError = RPCError

    def __init__(self) -> None:
        self.attributes = dict(JOB)
        self.refuse: list[str] = []
        self.asked = 0
        self.slurmctld = SimpleNamespace(Config=SimpleNamespace(load=lambda: CONFIG))
        self.Jobs = SimpleNamespace(
            load=lambda: {501: SimpleNamespace(**self.attributes)}  # has .values(), as theirs
        )
        self.Partitions = SimpleNamespace(load=lambda: {"low": LOW})
        self.Job = SimpleNamespace(load=self._load)

    def _load(self, job_id: int) -> SimpleNamespace:
        self.asked += 1
        if self.refuse:
            raise RPCError(self.refuse.pop(0))
        assert job_id == self.attributes["id"]
        return SimpleNamespace(**self.attributes)


@pytest.fixture
def module() -> StandIn:
    return StandIn()


@pytest.fixture
def client(module: StandIn, monkeypatch: pytest.MonkeyPatch) -> SlurmClient:
    monkeypatch.setattr(libslurm, "_failure", "")
    return SlurmClient({"PATH": ""}, libslurm=Libslurm(module))


def test_job(client: SlurmClient, module: StandIn) -> None:
    """A job of pyslurm's is the same value as the same job from squeue's JSON."""
    rows = listings.read_jobs((RECORDED / "25.11/squeue_handmade.json").read_text())
    assert client.job(501) == rows[0]
    assert client.jobs() == (rows[0],)
    assert client.jobs(user="eve") == ()
    assert client.jobs(ids=[JobId(7)]) == ()
    module.attributes |= {"time_limit": None, "state": "COMPLETING", "allocated_nodes": None}
    assert client.job(501) == replace(
        rows[0],
        time_limit_s=None,
        state=JobState.COMPLETING,
        flags=frozenset({"COMPLETING"}),
        nodes=(),
        node_list="",
    )


def test_array_tasks(client: SlurmClient, module: StandIn) -> None:
    """Task 0, of which pyslurm makes None, is told from the record of tasks not started. stderr
    without a file of its own, of which it tells none either, goes where stdout goes. Of an array it
    may give another job than was asked for: then the programs are."""
    module.attributes |= {"array_id": 500, "standard_error": None}
    for task, waiting, expected in ((3, None, 3), (None, None, 0), (None, "0-3", None)):
        module.attributes |= {"array_task_id": task, "array_tasks_waiting": waiting}
        job = client.job(501)
        assert (job.array_job_id, job.array_task_id) == (500, expected)
        assert job.std_err == "/home/ada/train-501.out"
    module.Job.load = lambda _: SimpleNamespace(**module.attributes | {"id": 502})
    with pytest.raises(SlurmMissing, match="no program scontrol"):
        client.job(501)
    assert client.backend == "pyslurm"


def test_partitions_and_config(client: SlurmClient) -> None:
    """Partitions and configuration come in the words and units of scontrol."""
    (low,) = client.partitions()
    assert (low.name, low.grace_time_s, low.max_time_s) == ("low", 0, None)
    assert low.nodes == ("gpu08", "gpu09")
    config = client.config()
    assert config.version == (25, 11, 7)
    assert (config.kill_wait_s, config.cred_expire_s, config.suspend_grace_time_s) == (30, 5, 7)
    assert (config.job_requeue, config.appends_output, config.has_accounting) == (True, True, True)
    assert (config.requeue_wait_s, config["OverTimeLimit"]) == (10, "2")
    assert (config.exempt_s, config.most_requeues) == (1800, 5)
    assert (config.gang, config.signals_children, config.send_user_signal) == (True, False, False)
    assert config["PreemptParameters"] == "suspend_grace_time=7,youngest_first"


@pytest.mark.parametrize(
    ("sentence", "error"),
    [
        ("Access/permission denied", NotPermitted),
        ("Job is not running", WrongJobState),
        ("Invalid job id specified", NoSuchJob),
    ],
)
def test_errors(
    client: SlurmClient, module: StandIn, sentence: str, error: type[SlurmError]
) -> None:
    """The sentences of libslurm are the same errors as those of the programs."""
    module.refuse = [sentence]
    with pytest.raises(error, match="pyslurm: load job 501"):
        client.job(501)
    assert client.backend == "pyslurm"


@pytest.mark.parametrize("sentence", ["Protocol authentication error", "Something new", ""])
def test_what_libslurm_cannot_ask(client: SlurmClient, module: StandIn, sentence: str) -> None:
    """It is left to the programs, of which there are none here, and not tried again; so is what a
    pyslurm with other names does not tell."""
    if sentence:
        module.refuse = [sentence]
    else:
        del module.attributes["requeue_count"]
    for _ in range(2):
        with pytest.raises(SlurmMissing, match="no program scontrol"):
            client.job(501)
    assert module.asked == 1
    assert client.why.startswith(f"commands: pyslurm: load job 501: {sentence}")
    assert sentence or ("requeue_count" in client.why and "pyslurm 25.11" in client.why)


def test_what_changes_a_job_is_left_to_the_programs(client: SlurmClient, module: StandIn) -> None:
    """To libslurm an element of an array is a number, which may be that of the whole array."""
    job = Job(job_id=501, state=JobState.RUNNING)
    acts = (client.suspend, client.resume, client.requeue, client.cancel)
    for act in (*acts, lambda job: client.signal(job, "USR1")):
        with pytest.raises(SlurmMissing, match="no program"):
            act(job)
    assert module.asked == 0

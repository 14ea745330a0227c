"""Every backend keeps what SlurmClient promises, against a real Slurm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import wait_until

from hydroslurm.core.jobid import JobId
from hydroslurm.devcluster import DevCluster
from hydroslurm.errors import NoSuchJob, SlurmError, SlurmMissing, WrongJobState
from hydroslurm.slurm.client import Job, JobState, SlurmClient, open_client

pytestmark = pytest.mark.slurm

UNKNOWN_JOB = 67_000_000

# the batch shell and its one task say which signals they get; both live until they are ended
TALKER = """#!/bin/bash
trap 'echo batch got USR1' USR1
srun -n1 bash -c '
    trap "echo task got USR1" USR1
    trap "echo task got URG" URG
    echo ready
    while :; do sleep 0.1; done
' &
while :; do wait; done
"""


@pytest.fixture(scope="module", params=["commands", "pyslurm"])
def client(request: pytest.FixtureRequest, pause_cluster: DevCluster) -> Iterator[SlurmClient]:
    """Each backend in turn; pyslurm where it is installed for the Slurm that is."""
    with pytest.MonkeyPatch.context() as patch:
        # pyslurm reads this process's environment, once, when it is imported
        for name, value in pause_cluster.environ().items():
            patch.setenv(name, value)
        try:
            yield open_client(request.param, environ=pause_cluster.child_environ())
        except SlurmMissing as error:
            pytest.skip(str(error))


class Jobs:
    """Submits jobs into ``low`` and ends them when the test is over."""

    def __init__(self, cluster: DevCluster, folder: Path) -> None:
        self.run = cluster.run
        self.folder = folder
        self.ids: list[int] = []

    def submit(self, *options: str, script: str = "#!/bin/bash\nexec sleep 300\n") -> int:
        path = self.folder / f"job-{len(self.ids)}.sh"
        path.write_text(script)
        argv = ["sbatch", "--parsable", "-p", "low", "-D", str(self.folder), *options, str(path)]
        self.ids.append(int(self.run(argv).stdout.split(";")[0]))
        return self.ids[-1]

    def interactive(self) -> int:
        """One that has no batch script."""
        said = self.run(["salloc", "--no-shell", "-n1", "-p", "low"]).stderr
        self.ids.append(int(said.rsplit("allocation ", 1)[1].split()[0]))
        return self.ids[-1]


@pytest.fixture
def jobs(pause_cluster: DevCluster, tmp_path: Path) -> Iterator[Jobs]:
    submitted = Jobs(pause_cluster, tmp_path)
    yield submitted
    if submitted.ids:
        pause_cluster.run(["scancel", *map(str, submitted.ids)], check=False)


def _wait(client: SlurmClient, job_id: int, want: Callable[[Job], bool]) -> Job:
    """The job, once it is as wanted."""
    wait_until(lambda: want(client.job(job_id)), lambda: f"still {client.job(job_id)}")
    return client.job(job_id)


def _running(client: SlurmClient, job_id: int) -> Job:
    return _wait_state(client, job_id, JobState.RUNNING)


def _wait_state(client: SlurmClient, job_id: int, state: JobState) -> Job:
    return _wait(client, job_id, lambda job: job.state is state)


def _wait_text(path: Path, text: str) -> str:
    """The file's content, once it holds the text."""
    wait_until(lambda: path.exists() and text in path.read_text(), f"{text} in {path}")
    return path.read_text()


def _attempts(client: SlurmClient, job_id: int) -> tuple[Job, ...]:
    """Those that accounting knows; it is told a little later."""
    try:
        return client.history(JobId(job_id))
    except NoSuchJob:
        return ()


def test_a_running_job(client: SlurmClient, jobs: Jobs, tmp_path: Path) -> None:
    """A job is described in full, the same alone and among all, whatever its texts hold."""
    comment = "hydroslurm:/runs/a b=c StdOut=/not/this JobId=5"
    options = ["-n2", "-t1-00:10:00", "--mem=100M", "-e", "err-%j", "-p", "urgent"]
    texts = ["-J", "a name=1", f"--comment={comment}", "-o", f"{tmp_path}/out %x=%j"]
    job_id = jobs.submit(*options, *texts)
    job = _running(client, job_id)
    assert (job.job_id, job.name, job.partition) == (job_id, "a name=1", "urgent")
    assert job.comment == comment
    assert job.flags == {"RUNNING"}
    assert len(job.nodes) == job.n_nodes
    assert job.n_tasks == 2
    assert job.time_limit_s == 87000
    assert job.memory_per_node_bytes == 100 * 2**20
    assert job.work_dir == str(tmp_path)
    assert job.std_out == f"{tmp_path}/out a name=1={job_id}"
    assert job.std_err == f"{tmp_path}/err-{job_id}"
    assert (job.is_batch, job.may_requeue, job.restart_count) == (True, True, 0)
    assert job.submit_epoch_s is not None
    assert job.start_epoch_s is not None
    assert abs(time.time() - job.start_epoch_s) < 60
    assert job.start_epoch_s >= job.submit_epoch_s
    assert job.end_epoch_s == job.start_epoch_s + job.time_limit_s
    assert (job.preempt_epoch_s, job.suspend_epoch_s, job.array_job_id) == (None, None, None)
    assert client.jobs(ids=[JobId(job_id)]) == (job,)
    assert job in client.jobs()
    assert job in client.jobs(user=job.user)
    assert job not in client.jobs(user="nobody")


def test_suspend_and_resume(client: SlurmClient, jobs: Jobs) -> None:
    """A job is suspended, twice without harm, refuses signals meanwhile, and is resumed once."""
    job = _running(client, jobs.submit())
    client.suspend(job)
    job = _wait_state(client, job.job_id, JobState.SUSPENDED)
    assert job.suspend_epoch_s is not None
    client.suspend(job)
    with pytest.raises(WrongJobState):
        client.signal(job, "USR1")
    client.resume(job)
    job = _running(client, job.job_id)
    with pytest.raises(WrongJobState):
        client.resume(job)


def test_requeue_and_cancel(client: SlurmClient, jobs: Jobs) -> None:
    """A requeued job waits again with one restart; the second requeue succeeds and counts none. A
    cancelled job ends; cancelling it again is no error; nothing else can be done with either.
    History has one entry for each attempt, the first one ended by the requeue."""
    job = _running(client, jobs.submit())
    client.requeue(job)
    job = _wait_state(client, job.job_id, JobState.PENDING)
    assert job.restart_count == 1
    client.requeue(job)
    assert client.job(job.job_id).restart_count == 1
    refused = (client.suspend, lambda job: client.signal(job, "USR1"))
    for act in refused:
        with pytest.raises(WrongJobState):
            act(job)
    client.cancel(job)
    job = _wait_state(client, job.job_id, JobState.CANCELLED)
    client.cancel(job)
    for act in (*refused, client.resume):
        with pytest.raises(WrongJobState):
            act(job)
    wait_until(lambda: len(_attempts(client, job.job_id)) == 2, "both attempts in accounting")
    first, second = _attempts(client, job.job_id)
    assert (first.restart_count, second.restart_count) == (0, 1)
    assert (first.state, second.state) == (JobState.REQUEUED, JobState.CANCELLED)
    assert first.nodes


def test_signals(client: SlurmClient, jobs: Jobs, tmp_path: Path) -> None:
    """Signals reach the job steps, or one of them, and not the batch shell."""
    job_id = jobs.submit("-o", "out", script=TALKER)
    out = tmp_path / "out"
    _wait_text(out, "ready")
    client.signal(client.job(job_id), "URG")
    assert "batch" not in _wait_text(out, "task got URG")
    client.signal(client.job(job_id), "USR1", step=0)
    assert "batch" not in _wait_text(out, "task got USR1")


def test_jobs_that_cannot_be_requeued(client: SlurmClient, jobs: Jobs) -> None:
    """--no-requeue and what srun started itself: refused, and the job goes on. Whether a running
    job may be requeued can be changed, and Slurm's requeue heeds it."""
    job = _running(client, jobs.submit("--no-requeue"))
    with pytest.raises(WrongJobState):
        client.requeue(job)
    job = client.job(job.job_id)
    assert (job.state, job.may_requeue) == (JobState.RUNNING, False)
    client.set_requeue(job, allowed=True)
    assert client.job(job.job_id).may_requeue is True
    client.set_requeue(job, allowed=False)
    with pytest.raises(WrongJobState):
        client.requeue(job)
    interactive = client.job(jobs.interactive())
    assert interactive.is_batch is False
    with pytest.raises(WrongJobState):
        client.requeue(interactive)


def test_exit_codes(client: SlurmClient, jobs: Jobs) -> None:
    """The exit code of the batch script is told once it has ended, by accounting too. stderr
    without a file of its own goes where stdout goes, and a job says so alone and among all."""
    job_id = jobs.submit("-o", "out-%j", script="#!/bin/bash\nexit 143\n")
    job = _wait(client, job_id, lambda job: job.state.has_ended)
    assert (job.state, job.exit_code) == (JobState.FAILED, 15)
    assert job.std_err == job.std_out == f"{jobs.folder}/out-{job_id}"
    assert client.jobs(ids=[JobId(job_id)]) == (job,)

    def has_ended() -> bool:
        return any(attempt.state.has_ended for attempt in _attempts(client, job_id)[-1:])

    wait_until(has_ended, "its end in accounting")
    assert _attempts(client, job_id)[-1].exit_code == 15


def test_arrays(client: SlurmClient, jobs: Jobs) -> None:
    """The id of an array finds its tasks, task 0 included, and the record of those that wait."""
    array_id = jobs.submit("--array=0-2%1")

    def one_runs() -> bool:
        return any(job.state is JobState.RUNNING for job in client.jobs(ids=[JobId(array_id)]))

    wait_until(one_runs, "a task to run")
    tasks = client.jobs(ids=[JobId(array_id)])
    assert {job.array_job_id for job in tasks} == {array_id}
    assert {job.array_task_id: job.state.value for job in tasks} == {0: "RUNNING", None: "PENDING"}
    assert {job.job_id for job in tasks} >= {array_id}
    assert all(client.job(job.job_id) == job for job in tasks)


def test_unknown_job(client: SlurmClient) -> None:
    """Every question about a job that does not exist says so, and leaves it out of lists."""
    with pytest.raises(NoSuchJob):
        client.job(UNKNOWN_JOB)
    for job_id in (JobId(UNKNOWN_JOB), JobId(UNKNOWN_JOB, 3), JobId(UNKNOWN_JOB, component=1)):
        for ask_of in (client.jobs_of, client.history):
            with pytest.raises(NoSuchJob):
                ask_of(job_id)
        assert client.jobs(ids=[job_id]) == ()


def test_another_cluster_in_one_process(
    client: SlurmClient, requeue_cluster: DevCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SLURM_CONF has changed, a new client answers from the new cluster, whatever libslurm
    has read before; the first client stays with the first one."""
    for name, value in requeue_cluster.environ().items():
        monkeypatch.setenv(name, value)
    # not pyslurm beside the commands: it would bind this process to the second cluster
    prefer = "commands" if client.backend == "commands" else None
    other = open_client(prefer, environ=requeue_cluster.child_environ())
    assert {each.preempt_mode for each in other.partitions()} == {"REQUEUE", "OFF"}
    assert {each.preempt_mode for each in client.partitions()} == {"SUSPEND", "REQUEUE", "OFF"}
    if client.backend == "pyslurm":
        with pytest.raises(SlurmMissing, match="which it read first"):
            open_client("pyslurm", environ=requeue_cluster.child_environ())


def test_partitions(client: SlurmClient) -> None:
    """Partitions are described, with the tiers and modes that make preemption work, and the address
    of a node is told; an unknown node is an error that names it."""
    partitions = {partition.name: partition for partition in client.partitions()}
    low, urgent = partitions["low"], partitions["urgent"]
    assert low.preempt_mode == "SUSPEND"
    assert urgent.priority_tier > low.priority_tier
    assert len(low.nodes) == 12
    assert (low.state, urgent.is_default) == ("UP", False)
    assert client.node_address("n1") == "127.0.0.1"
    with pytest.raises(SlurmError, match="no-such-node"):
        client.node_address("no-such-node")


def test_config(client: SlurmClient, pause_cluster: DevCluster) -> None:
    """The controller's settings are read: release, preemption, waits; and the QOS that every
    cluster with accounting has."""
    config = client.config()
    release = pause_cluster.run(["scontrol", "--version"]).stdout.split()[1]
    assert config.version == tuple(int(part) for part in release.split(".")[:3])
    assert set(config.preempt_mode.split(",")) == {"SUSPEND", "GANG"}
    assert config.kill_wait_s == 5
    assert config.cred_expire_s == 5
    assert config.suspend_grace_time_s == 2
    assert config.proctrack_type == "proctrack/linuxproc"
    assert config.cluster_name
    normal = {qos.name: qos for qos in client.qoses() or ()}["normal"]
    assert (normal.grace_time_s, normal.preempt_mode, normal.preempts) == (0, "", ())


def test_batch_script(client: SlurmClient, jobs: Jobs) -> None:
    """A batch job's script comes back as submitted; what has none gives None."""
    job_id = jobs.submit("--begin=now+1hour", script=TALKER)
    assert client.batch_script(client.job(job_id)) == TALKER
    assert client.batch_script(Job(job_id=UNKNOWN_JOB, state=JobState.RUNNING)) is None
    job = client.job(jobs.interactive())
    assert client.batch_script(job) is None
    assert (job.qos, job.gres, job.work_dir) == ("normal", "", str(Path.cwd()))

"""A requeue while slurmctld is really gone, and comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from clusters import require_slurm
from processes import has_ended, wait_until

from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.slurm.client import JobState, RetryPolicy, open_client
from hydroslurm.slurm.policy import StopReason
from hydroslurm.slurm.stops import IN_GRACE, ask_why

pytestmark = pytest.mark.slurm


def _stop_controller(cluster: DevCluster) -> tuple[list[str], dict[str, str]]:
    """End slurmctld as an administrator would; its own command line, but for ``-c``, which would
    forget all jobs, and its environment."""
    (pid,) = [d.pid for d in cluster.status().daemons if d.name == "slurmctld"]
    words, variables = (
        Path(f"/proc/{pid}/{name}").read_text().split("\0")[:-1] for name in ("cmdline", "environ")
    )
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: has_ended(pid), "slurmctld to end")
    argv = [word for word in words if word != "-c"]
    return argv, dict(variable.split("=", 1) for variable in variables)


def _impatient(cluster: DevCluster, folder: Path) -> dict[str, str]:
    """The way to a cluster for programs that give up on an absent controller after 2 s."""
    settings = cluster.slurm_conf.read_text()
    assert "MessageTimeout=30" in settings
    conf = folder / "slurm.conf"
    conf.write_text(settings.replace("MessageTimeout=30", "MessageTimeout=2"))
    return {**cluster.child_environ(), "SLURM_CONF": str(conf)}


def test_requeue_waits_for_slurmctld(tmp_path: Path) -> None:
    """A requeue that finds no controller is repeated until there is one, and then succeeds; asked
    for a reason meanwhile, the answer is soon that nobody can tell."""
    require_slurm()
    with DevCluster.up(ClusterSpec(nodes=1, profile="requeue", kill_wait_s=5)) as cluster:
        submit = ["sbatch", "--parsable", "-o", "/dev/null", "--wrap", "exec sleep 300"]
        job_id = int(cluster.run(submit).stdout)
        there = open_client(environ=cluster.child_environ())
        wait_until(lambda: there.job(job_id).state is JobState.RUNNING, "the job")
        job = there.job(job_id)
        argv, variables = _stop_controller(cluster)
        environ = _impatient(cluster, tmp_path)
        stop = ask_why(open_client(environ=environ, retry_policy=IN_GRACE), job_id)
        assert stop.reason is StopReason.UNKNOWN
        retried = threading.Event()
        pause = threading.Event()

        def wait_a_little(seconds: float) -> None:
            retried.set()
            pause.wait(seconds)

        client = open_client(environ=environ, retry_policy=RetryPolicy(sleep=wait_a_little))
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client.requeue, job)
            assert retried.wait(60)
            quiet = subprocess.DEVNULL
            controller = subprocess.Popen(argv, env=variables, stdout=quiet, stderr=quiet)
            try:
                asked.result(90)
                assert client.job(job_id).restart_count == 1
            finally:
                controller.terminate()
                controller.wait(30)

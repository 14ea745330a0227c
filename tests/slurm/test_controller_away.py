"""A requeue while slurmctld is really gone, and comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from clusters import require_slurm
from processes import wait_until
from slurm.victims import Victim

from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.slurm.client import RetryPolicy, open_client
from hydroslurm.slurm.stops import IN_GRACE, StopReason, ask_why

pytestmark = pytest.mark.slurm


class Controller:
    """The slurmctld of a cluster of ours: ended as an administrator would, and started again with
    its own command line and environment, but for ``-c``, which would forget all jobs."""

    def __init__(self, cluster: DevCluster) -> None:
        (self.pid,) = [d.pid for d in cluster.status().daemons if d.name == "slurmctld"]
        entry = Path(f"/proc/{self.pid}")
        words = (entry / "cmdline").read_text().split("\0")[:-1]
        self._argv = [word for word in words if word != "-c"]
        variables = (entry / "environ").read_text().split("\0")[:-1]
        self._environ = dict(variable.split("=", 1) for variable in variables)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGTERM)
        gone = Path(f"/proc/{self.pid}/stat")
        wait_until(
            lambda: not gone.exists() or gone.read_text().rpartition(")")[2].split()[0] == "Z",
            "slurmctld to end",
        )

    @contextmanager
    def started_again(self) -> Iterator[None]:
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(self._argv, env=self._environ, stdout=quiet, stderr=quiet)
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


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
        victim = Victim(cluster, tmp_path / "a", node="n1", cpus=1)
        victim.wait_for("ready")
        job = open_client(environ=cluster.child_environ()).job(victim.id)
        controller = Controller(cluster)
        controller.stop()
        environ = _impatient(cluster, tmp_path)
        assert ask_why(open_client(environ=environ, retry_policy=IN_GRACE), victim.id).reason is (
            StopReason.UNKNOWN
        )
        retried = threading.Event()
        pause = threading.Event()

        def wait_a_little(seconds: float) -> None:
            retried.set()
            pause.wait(seconds)

        client = open_client(environ=environ, retry_policy=RetryPolicy(sleep=wait_a_little))
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client.requeue, job)
            assert retried.wait(60)
            with controller.started_again():
                asked.result(90)
                assert client.job(victim.id).restart_count == 1
                victim.wait_for("SIGTERM")
                victim.end()
                victim.wait_for_kill()

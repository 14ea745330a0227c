"""What sbatch/ has for administrators: a cluster comes up with these lines and does what they
say."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from clusters import require_slurm
from processes import captured, wait_until

from hydroslurm.devcluster import ClusterSpec, DevCluster

pytestmark = pytest.mark.slurm

SBATCH = Path(__file__).resolve().parents[2] / "sbatch"
LIMIT_S = 120.0
LIVES = 'trap "echo told; scontrol requeue $SLURM_JOB_ID; exit 75" TERM'
"""A job step that saves nothing, but leaves as one that does."""
GOES_ON = "echo up; while :; do sleep 0.1; done"


def lines_of(name: str) -> str:
    """A snippet, for the nodes of a dev cluster."""
    text = (SBATCH / name).read_text()
    assert "Nodes=node[01-04]" in text
    return text.replace("node[01-04]", "n[1-2]")


def submit(cluster: DevCluster, folder: Path, *options: str) -> tuple[str, Path]:
    """A job of both nodes, which is preempted as well as one that saves; its id and its log."""
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\nsrun bash -c '{LIVES}\n{GOES_ON}'\n")
    log = folder / f"log{len(list(folder.glob('log*')))}"
    common = ("--nodes=2", "--exclusive", "--requeue", "--open-mode=append", f"--output={log}")
    job = cluster.run(["sbatch", "--parsable", *common, *options, str(script)]).stdout.strip()
    wait_until(
        lambda: log.exists() and log.read_text().count("up\n") == 2, "the job", limit_s=LIMIT_S
    )
    return job, log


def field(cluster: DevCluster, job: str, letter: str) -> str:
    return cluster.run(["squeue", "-h", "-j", job, "-o", f"%{letter}"]).stdout.strip()


def assert_requeued(cluster: DevCluster, job: str, log: Path, *urgent: str) -> None:
    """An urgent job takes the nodes, and the other is told, and waits for another attempt."""
    cluster.run(["srun", "--nodes=2", "--exclusive", *urgent, "true"], timeout_s=LIMIT_S)
    shown = cluster.run(["scontrol", "show", "job", job]).stdout
    assert "told" in log.read_text()
    assert " Restarts=1 " in shown
    assert re.search(r"JobState=(PENDING|RUNNING|CONFIGURING|COMPLETING)", shown), shown
    cluster.run(["scancel", "--signal=KILL", job], check=False)
    cluster.run(["scancel", job])


def test_partitions_for_pause(tmp_path: Path) -> None:
    """partitions.conf: an urgent job suspends, and what it suspended goes on."""
    require_slurm()
    spec = ClusterSpec(nodes=2, partitions=lines_of("partitions.conf"))
    with DevCluster.up(spec) as cluster:
        job, _ = submit(cluster, tmp_path, "--mem-per-cpu=100")
        until = tmp_path / "until"
        urgent = ["srun", "-p", "urgent", "--nodes=2", "--exclusive", "--mem-per-cpu=100"]
        waits = f"while [ ! -e {until} ]; do sleep 0.05; done"
        with subprocess.Popen([*urgent, "sh", "-c", waits], env=cluster.child_environ()) as one:
            wait_until(
                lambda: field(cluster, job, "T") == "SUSPENDED", "suspension", limit_s=LIMIT_S
            )
            until.touch()
            assert one.wait(LIMIT_S) == 0
        wait_until(lambda: field(cluster, job, "T") == "RUNNING", "resumption", limit_s=LIMIT_S)


def test_partitions_for_requeue(tmp_path: Path) -> None:
    """partitions-requeue.conf: an urgent job's victim is told, asks for its requeue and waits."""
    require_slurm()
    spec = ClusterSpec(nodes=2, partitions=lines_of("partitions-requeue.conf"))
    with DevCluster.up(spec) as cluster:
        job, log = submit(cluster, tmp_path)
        assert_requeued(cluster, job, log, "--partition=urgent")


def test_qos_preemption_and_job_submit(tmp_path: Path) -> None:
    """qos-preemption: the same by QOS. job_submit.lua: --preempt, of sbatch, srun and the
    environment, leads to the partition or the QOS of its mode; who names one keeps it."""
    require_slurm()
    lines = lines_of("qos-preemption.conf")
    low = "PartitionName=low Nodes=n[1-2]\n"
    with DevCluster.up(ClusterSpec(nodes=2, partitions=f"{lines}{low}")) as cluster:
        cluster.run(["sh", str(SBATCH / "qos-preemption.sh")], timeout_s=LIMIT_S)
        wait_until(
            lambda: cluster.run(["srun", "--qos=urgent", "true"], check=False).returncode == 0,
            "the QOS to be known",
            limit_s=LIMIT_S,
        )
        assert cluster.run(["srun", "--qos=unheard", "true"], check=False).returncode != 0
        job, log = submit(cluster, tmp_path, "--qos=preemptible")
        assert_requeued(cluster, job, log, "--qos=urgent")
        _install_lua(cluster)
        for options, environ, expected in (
            (["--preempt=pause"], {}, "low normal"),
            (["--preempt"], {}, "low normal"),
            (["--preempt=requeue"], {}, "main preemptible"),
            ([], {"HYDROSLURM_PREEMPT": "requeue"}, "main preemptible"),
            (["--preempt", "-p", "main"], {}, "main normal"),
            (["--preempt=requeue", "--qos=urgent"], {}, "main urgent"),
            ([], {}, "main normal"),
        ):
            assert _routed(cluster, options, environ) == expected, (options, environ)
        where = ["sh", "-c", "echo $SLURM_JOB_PARTITION $SLURM_JOB_QOS"]
        done = cluster.run(["srun", "--preempt=requeue", *where], timeout_s=LIMIT_S)
        assert done.stdout == "main preemptible\n"
        assert "--preempt=requeue: QOS preemptible" in done.stderr


def _install_lua(cluster: DevCluster) -> None:
    """With another route for requeue, as its words say that one may."""
    text = (SBATCH / "job_submit.lua").read_text()
    route = 'requeue = { partition = "low", qos = nil }'
    assert route in text
    changed = text.replace(route, 'requeue = { partition = nil, qos = "preemptible" }')
    (cluster.slurm_conf.parent / "job_submit.lua").write_text(changed)
    with cluster.slurm_conf.open("a") as conf:
        conf.write("JobSubmitPlugins=lua\n")
    cluster.run(["scontrol", "reconfigure"])
    config = ["scontrol", "show", "config"]
    plugin = r"JobSubmitPlugins += lua"
    wait_until(lambda: re.search(plugin, cluster.run(config).stdout), "the plugin")


def _routed(cluster: DevCluster, options: list[str], environ: dict[str, str]) -> str:
    """Partition and QOS of a job that is submitted with these options."""
    command = ["sbatch", "--parsable", "--hold", *options, "--wrap=true"]
    done = captured(command, env={**cluster.child_environ(), **environ}, timeout=60)
    job = done.stdout.strip()
    shown = field(cluster, job, "P"), field(cluster, job, "q")
    cluster.run(["scancel", job])
    return " ".join(shown)

"""``hydroslurm doctor`` on a real Slurm of each kind, and where there is none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from clusters import Part
from processes import wait_until
from statusfile import write_status
from typer.testing import CliRunner

from hydroslurm.checkpoint.manifest import Manifest
from hydroslurm.cli.doctor import doctor
from hydroslurm.core.events import Event, EventKind, EventLog
from hydroslurm.core.rundir import RunDir
from hydroslurm.devcluster import DevCluster

# typer.testing.Result: click itself is not always there to import it from
Result = Any
Doctor = Callable[..., Result]
SCRIPT = "#!/bin/bash\n#SBATCH --signal=URG@30 --open-mode=append\nexec sleep 300\n"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Run the verb with the environment of a cluster, or with another one."""
    app = typer.Typer()
    app.command()(doctor)

    def call(where: DevCluster | dict[str, str], *arguments: str) -> Result:
        environ = where if isinstance(where, dict) else where.child_environ()
        for name in os.environ:
            if name.startswith(("SLURM_", "HYDROSLURM_SLURM")):
                monkeypatch.delenv(name)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return CliRunner().invoke(app, list(arguments))

    return call


def _json(result: Result) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def _severities(answer: dict[str, Any]) -> dict[str, str]:
    return {finding["key"]: finding["severity"] for finding in answer["findings"]}


def _rank(work_dir: Path, job_id: str, kind: EventKind, *, folder: str = "") -> None:
    """What rank 0 of a job writes; ``folder``: into that of another job."""
    path = RunDir(work_dir / "hydroslurm-runs" / (folder or job_id)).rank_events(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    log = EventLog(path)
    log.append(Event(kind, 1, 1, job_id=int(job_id)))
    log.close()
    write_status(path)


def _saved(run: Path, save_s: float) -> None:
    """A checkpoint that took so long."""
    manifest = run / "checkpoints/step-000000007/manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(Manifest(7, 0, "periodic", 0, save_s, state_bytes=1, files={}).to_json())


def _squeue(cluster: DevCluster, job_id: str, *options: str) -> str:
    return str(cluster.run(["squeue", "-h", "-t", "all", "-j", job_id, *options]).stdout)


def _wait_for_state(cluster: DevCluster, job_id: str, state: str) -> None:
    wait_until(lambda: _squeue(cluster, job_id, "-o", "%T").strip() == state, f"it is {state}")


@pytest.mark.slurm
def test_pause(pause_cluster: Part, run: Doctor, tmp_path: Path) -> None:
    """Where preemption pauses, that is said, and the time limit is what a save has to fit into. A
    run folder tells how long a save takes."""
    answer = _json(run(pause_cluster, "--json", "--save-s", "0.5"))
    assert answer["partition"] == "low"
    assert answer["policy"]["action"] == "pause"
    assert answer["policy"]["suspend_grace_s"] == 2
    assert _severities(answer)["gres"] == "note"
    assert [row["kind"] for row in answer["time_left"]] == [
        "time_limit", "requeued", "cancelled", "node_failing",
    ]  # fmt: skip
    table = run(pause_cluster)
    assert table.exit_code == 0
    assert "paused in place" in table.stdout
    assert "scontrol requeue" in table.stdout
    _saved(tmp_path, 40.0)
    result = run(pause_cluster, "--json", "--run", str(tmp_path))
    assert _json(result)["save"]["save_s"] == 40.0


@pytest.mark.slurm
def test_requeue_with_a_running_job(requeue_cluster: Part, run: Doctor, tmp_path: Path) -> None:
    """A real job brings its partition, its time limit and the options of its script; a save that
    takes longer than grace and KillWait means loss, and exit status 1."""
    script = tmp_path / "job.sh"
    script.write_text(SCRIPT)
    where = ["-p", "low", "-t", "10", "-D", str(tmp_path)]
    job_id = requeue_cluster.run(["sbatch", "--parsable", *where, str(script)]).stdout.strip()
    try:
        _wait_for_state(requeue_cluster, job_id, "RUNNING")
        short = run(requeue_cluster, job_id, "--json", "--save-s", "1")
        answer = _json(short)
        assert (short.exit_code, answer["job_id"]) == (0, int(job_id))
        assert answer["policy"]["grace_s"] == requeue_cluster.spec.grace_s
        assert answer["work_would_be_lost"] is False
        left = {row["kind"]: row["seconds"] for row in answer["time_left"]}
        assert left["preempted"] > left["requeued"] == left["cancelled"] > 0
        assert left["time_limit"] > 30
        # it runs, and nobody in it has announced itself
        assert _severities(answer) == {"preemption": "risk", "save": "ok"}
        assert answer["saver"] == "nobody"
        _rank(tmp_path, "999999", EventKind.ATTEMPT_BEGAN, folder=job_id)
        assert _json(run(requeue_cluster, job_id, "--json"))["saver"] == "nobody"
        _rank(tmp_path, job_id, EventKind.INSTALLED)
        assert _json(run(requeue_cluster, job_id, "--json"))["saver"] == "no_run"
        _rank(tmp_path, job_id, EventKind.ATTEMPT_BEGAN)
        answer = _json(run(requeue_cluster, job_id, "--json", "--save-s", "1"))
        assert (answer["saver"], _severities(answer)["preemption"]) == ("run", "ok")
        _saved(tmp_path / "hydroslurm-runs" / job_id, 100.0)
        long = run(requeue_cluster, job_id)
        assert long.exit_code == 1
        assert "loss" in long.stdout
        assert "KillWait=" in long.stdout
    finally:
        requeue_cluster.run(["scancel", job_id])


@pytest.mark.slurm
def test_a_planned_script_and_what_could_not_be_asked(
    pause_cluster: Part, run: Doctor, tmp_path: Path
) -> None:
    """A batch script that is not submitted yet is judged for many ranks and a long suspend. A
    question that cannot be answered ends with 2 and a sentence, never with 1."""
    script = tmp_path / "job.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1\n"
        "export MASTER_PORT=29500\nsrun torchrun --nnodes=2 train.py\n"
    )
    answer = _json(run(pause_cluster, "--json", "--script", str(script), "--suspend-s", "600"))
    found = _severities(answer)
    clocks = {"clock_collectives", "clock_nccl", "clock_rendezvous", "clock_store"}
    assert {"launcher", "bad_exit", "port", *clocks} <= set(found)
    assert (found["launcher"], found["clock_rendezvous"]) == ("risk", "risk")
    for arguments, words in (
        (["5", "--script", str(script)], "a job has its own"),
        (["67000000"], "there is no job 67000000"),
        (["--partition", "nowhere"], "its partitions: low, gang, urgent"),
        (["5", "--partition", "low"], "either a job or --partition"),
        (["--run", "/no/such/folder"], "no such folder"),
        (["--run", "/", "--save-s", "1"], "either --run or --save-s"),
    ):
        result = run(pause_cluster, *arguments)
        assert (result.exit_code, words in result.stderr) == (2, True), arguments


def test_without_slurm(run: Doctor, tmp_path: Path) -> None:
    """No Slurm on this machine is a clear sentence and status 2."""
    result = run({"PATH": str(tmp_path)})
    assert result.exit_code == 2
    assert "no program scontrol on PATH" in result.stderr
    assert result.stdout == ""

"""What is written down of a submission, what is left of one that fails halfway, and how scripts
are run in a rank."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from processes import captured

from hydroslurm.core.rundir import RUN_DIR_ENV
from hydroslurm.errors import LaunchError, RunFolderError, SlurmMissing
from hydroslurm.jobs.launch import training_job
from hydroslurm.jobs.launch.executor import Executor
from hydroslurm.jobs.launch.rank import Script
from hydroslurm.jobs.launch.training_job import submit_job
from hydroslurm.jobs.spec.reading import loads

SPEC = "replicaSpecs: [{template: {command: [python, train.py]}}]"
SBATCH = """\
# Fake sbatch: takes every job, and ends with a status all the same; nothing can be written about
# the first one any more.
cd "$RUNS"/*training*
env >> "$RUNS/environ"
rm submission.json conditions.jsonl
mkdir submission.json conditions.jsonl
echo "Submitted batch job 41"
exit 3
"""


def test_a_job_that_cannot_be_recorded_keeps_its_id(
    programs: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm has it: an error would make people submit it again. It inherits nothing that says which
    task, element or restart of another job has submitted it."""
    programs(sbatch=SBATCH)
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    inherited = ("SBATCH_WAIT", "SLURM_ARRAY_TASK_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    for name in inherited:
        monkeypatch.setenv(name, "1")
    job = submit_job(loads(SPEC), folder=tmp_path / "runs", environ=os.environ)
    assert job.job_id == 41
    assert any("Slurm has job 41, but its run folder does not say so" in one for one in job.notes)
    environ = (tmp_path / "runs" / "environ").read_text()
    assert "RUNS=" in environ
    assert not any(f"{name}=" in environ for name in inherited)


@pytest.mark.parametrize("how", ["no Slurm", "a folder that cannot be made", "a full disk"])
def test_what_fails_before_sbatch_leaves_no_folder(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold the environment of the spec."""
    (tmp_path / "file").touch()
    spec = SPEC
    if how == "no Slurm":
        monkeypatch.setenv("PATH", str(tmp_path))
    elif how == "a full disk":
        monkeypatch.setattr(training_job, "job_script", raising(RunFolderError("no space left")))
    else:
        spec += f"\npreemption: {{checkpointDirectory: {tmp_path}/file/below}}"
    with pytest.raises(SlurmMissing if how == "no Slurm" else RunFolderError):
        submit_job(loads(spec), folder=tmp_path / "runs", environ=os.environ)
    assert not (tmp_path / "runs").exists()


TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


@pytest.mark.parametrize("fails", ["sbatch", "the record", "its answer"])
def test_a_job_of_submitit_that_slurm_has_is_named(
    fails: str, programs: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails after sbatch has taken it: the run folder stays, and the id is said. After a
    time-out, as of 22.05 when slurmctld hangs, Slurm may have it: how to look is said."""
    answer = f'echo "Submitted batch job 41"; exit {3 * (fails == "sbatch")}'
    sbatch = f"echo '{TIMED_OUT}' >&2; exit 1" if fails == "its answer" else answer
    programs(sbatch=sbatch, srun="", squeue='echo "squeue: error" >&2; exit 1')
    executor = Executor(tmp_path / "runs")
    if fails == "its answer":
        with pytest.raises(LaunchError, match="squeue --me") as refused:
            executor.submit(print, "x")
    elif fails == "sbatch":
        assert executor.submit(print, "x").job_id == "41"
    else:
        monkeypatch.setattr(Executor, "_lead_to", raising(OSError("no space left")))
        with pytest.warns(RuntimeWarning, match="Slurm has job 41"):
            assert executor.submit(print, "x").job_id == "41"
    (run,) = (tmp_path / "runs").glob("*-print-*")
    assert fails != "its answer" or str(run) in str(refused.value)
    assert (run / "submission.json").exists()


def raising(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise error

    return fail


def test_a_shell_reads_nothing_in_the_name_of_a_folder(
    programs: Callable[..., Path], tmp_path: Path
) -> None:
    """The script of a submitted function names its run folder to the ranks, as it is."""
    programs(sbatch='echo "Submitted batch job 7"', srun=f'echo "$(printenv {RUN_DIR_ENV})"')
    folder = tmp_path / "it's $(touch owned)"
    assert Executor(folder).submit(int, 3).job_id == "7"
    (script,) = folder.glob("*/logs/7_submission.sh")
    assert captured(["bash", script], cwd=tmp_path, timeout=60).stdout == f"{script.parents[1]}\n"
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(("statement", "status"), [("sys.exit()", 0), ("sys.exit(3)", 3), ("", 0)])
def test_a_script_runs_as_if_by_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, status: int
) -> None:
    """It is __main__, sees its arguments, and imports its neighbours; exit(0) is a good end, any
    other status goes on to the rank's own."""
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_script.py").write_text("value = 42\n")
    script, out = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(
        "import json, pathlib, sys, neighbour_of_script\n"
        "pathlib.Path(sys.argv[1]).write_text(json.dumps([__name__, sys.argv, "
        f"neighbour_of_script.value]))\n{statement}\n"
    )
    with pytest.raises(SystemExit) if status else contextlib.nullcontext() as leaving:
        Script(str(script), (str(out), "--lr", "1"))()
    assert leaving is None or leaving.value.code == status
    assert json.loads(out.read_text()) == ["__main__", [str(script), str(out), "--lr", "1"], 42]
    with pytest.raises(LaunchError, match="share"):  # not about runpy, but about file systems
        Script(str(tmp_path / "gone.py"))()

"""What is written down of a submission, what is left of one that fails halfway, and how scripts
are run in a rank."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from processes import captured

from hydroslurm.core.rundir import RUN_DIR_ENV, RunDir
from hydroslurm.errors import LaunchError, RunFolderError, SlurmMissing
from hydroslurm.jobs import submission
from hydroslurm.jobs.launch import training_job
from hydroslurm.jobs.launch.executor import Executor
from hydroslurm.jobs.launch.rank import InRank, Script
from hydroslurm.jobs.launch.training_job import submit_job
from hydroslurm.jobs.spec.reading import loads
from hydroslurm.jobs.submission import Submission

SPEC = "replicaSpecs: [{template: {command: [python, train.py]}}]"
SBATCH = """#!/bin/sh
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm has it: an error would make people submit it again. It inherits nothing that says which
    task, element or restart of another job has submitted it."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(SBATCH)
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
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


def test_without_slurm_no_run_folder_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold the environment of the spec."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmMissing):
        submit_job(loads(SPEC), folder=tmp_path / "runs", environ=os.environ)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("how", ["a checkpoint folder that cannot be made", "a full disk"])
def test_what_fails_before_sbatch_leaves_no_folder(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was submitted."""
    (tmp_path / "file").touch()
    spec = SPEC
    if how == "a full disk":
        monkeypatch.setattr(training_job, "job_script", raising(RunFolderError("no space left")))
    else:
        spec += f"\npreemption: {{checkpointDirectory: {tmp_path}/file/below}}"
    with pytest.raises(RunFolderError):
        submit_job(loads(spec), folder=tmp_path / "runs", environ=os.environ)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("fails", ["sbatch", "the record"])
def test_a_job_of_submitit_that_slurm_has_is_named(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails after sbatch has taken it: the run folder stays, and the id is said."""
    for name, script in (
        ("sbatch", f'echo "Submitted batch job 41"; exit {3 * (fails == "sbatch")}'),
        ("srun", ""),
        ("squeue", 'echo "squeue: error" >&2; exit 1'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    executor = Executor(tmp_path / "runs")
    if fails == "sbatch":
        assert executor.submit(print, "x").job_id == "41"
    else:
        monkeypatch.setattr(Executor, "_lead_to", raising(OSError("no space left")))
        with pytest.warns(RuntimeWarning, match="Slurm has job 41"):
            assert executor.submit(print, "x").job_id == "41"
    (run,) = (tmp_path / "runs").glob("*-print-*")
    assert (run / "submission.json").exists()


def raising(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise error

    return fail


def test_the_intent_is_there_before_the_id(tmp_path: Path) -> None:
    """An intent without an id is readable, and the id replaces it whole."""
    run = RunDir(tmp_path).create()
    intent = Submission("train", "python train.py")
    submission.write(run, intent)
    assert submission.read(tmp_path) == intent
    done = Submission("train", "python train.py", job_id="12")
    submission.write(run, done)
    assert submission.read(tmp_path) == done
    assert not list(tmp_path.glob("*.tmp"))


def test_a_shell_reads_nothing_in_the_name_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script of a submitted function names its run folder to the ranks, as it is."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, does in (("sbatch", "Submitted batch job 7"), ("srun", f"$(printenv {RUN_DIR_ENV})")):
        (programs / name).write_text(f'#!/bin/sh\necho "{does}"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    folder = tmp_path / "it's $(touch owned)"
    assert Executor(folder).submit(int, 3).job_id == "7"
    (script,) = folder.glob("*/logs/7_submission.sh")
    assert captured(["bash", script], cwd=tmp_path, timeout=60).stdout == f"{script.parents[1]}\n"
    assert not (tmp_path / "owned").exists()


def test_another_folder_is_not_taken_for_a_run_folder(tmp_path: Path) -> None:
    """Missing and foreign files are errors that name the file."""
    with pytest.raises(RunFolderError, match=r"submission\.json"):
        submission.read(tmp_path)
    RunDir(tmp_path).submission_json.write_text(json.dumps({"hello": 1}))
    with pytest.raises(RunFolderError, match="cannot be read"):
        submission.read(tmp_path)


@pytest.fixture
def _own_argv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("_own_argv")
def test_a_script_runs_as_if_by_python(tmp_path: Path) -> None:
    """It is __main__, sees its arguments, and imports its neighbours."""
    (tmp_path / "neighbour_of_script.py").write_text("value = 42\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import json, pathlib, sys, neighbour_of_script\n"
        "pathlib.Path(sys.argv[1]).write_text(json.dumps([__name__, sys.argv, "
        "neighbour_of_script.value]))\n"
    )
    out = tmp_path / "out.json"
    Script(str(script), (str(out), "--lr", "1"))()
    assert json.loads(out.read_text()) == ["__main__", [str(script), str(out), "--lr", "1"], 42]


@pytest.mark.usefixtures("_own_argv")
@pytest.mark.parametrize(
    ("statement", "passes"), [("sys.exit(0)", True), ("sys.exit()", True), ("sys.exit(3)", False)]
)
def test_a_scripts_exit_status_counts(tmp_path: Path, statement: str, passes: bool) -> None:
    """exit(0) is a good end, any other status goes on to the rank's own."""
    script = tmp_path / "train.py"
    script.write_text(f"import sys\n{statement}\n")
    if passes:
        Script(str(script))()
    else:
        with pytest.raises(SystemExit) as leaving:
            Script(str(script))()
        assert leaving.value.code == 3


def test_a_script_that_the_node_cannot_see_is_said_so(tmp_path: Path) -> None:
    """The error is about shared file systems, not about runpy."""
    with pytest.raises(LaunchError, match="share"):
        Script(str(tmp_path / "gone.py"))()


def test_every_task_of_an_array_has_its_own_run_folder(tmp_path: Path) -> None:
    """The array's folder holds one run folder per task."""
    wrapped = InRank(print, tmp_path, is_array=True)
    assert wrapped.run_dir({"SLURM_ARRAY_TASK_ID": "3"}) == tmp_path / "3"
    assert InRank(print, tmp_path).run_dir({}) == tmp_path

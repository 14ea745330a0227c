"""Container images: what is asked for, and what is said where nothing can run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hydroslurm.core.module_command import module_command
from hydroslurm.errors import LaunchError
from hydroslurm.jobs.images import (
    Runtime,
    apptainer_image,
    contained_argv,
    contained_environ,
    find_runtime,
    pyxis_image,
    pyxis_options,
)
from hydroslurm.jobs.plan import Plan, Step, TaskPlan
from hydroslurm.jobs.supervisor.job_step import srun_command

REFERENCE = "nvcr.io/nvidia/pytorch:24.05-py3"
# As `srun --help` of a Slurm with pyxis, or without it.
SRUN = """#!/bin/sh
echo "Usage: srun [OPTIONS...] executable [args...]"
{more}
"""
PYXIS_HELP = 'echo "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH"'
# Takes the words of `apptainer exec [--nv] [--bind PATH]... --pwd PATH IMAGE COMMAND...`, prints
# them, and runs the command with what APPTAINERENV_* name, on the host.
APPTAINER = """#!/usr/bin/env python3
import os, sys
print("apptainer", *sys.argv[1:], flush=True)
rest = sys.argv[2:]
while rest[0].startswith("--"):
    rest = rest[1:] if rest[0] == "--nv" else rest[2:]
for name, value in list(os.environ.items()):
    if name.startswith("APPTAINERENV_"):
        os.environ[name.removeprefix("APPTAINERENV_")] = value
os.execvp(rest[1], rest[1:])
"""


def program(folder: Path, name: str, text: str) -> Path:
    """A fake executable; its contract stands above its text."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_runtime_is_found_on_the_path(tmp_path: Path) -> None:
    """pyxis where srun says so, else Apptainer, else Singularity, else none."""
    path = f"{tmp_path / 'bin'}:/bin"
    assert find_runtime({"PATH": str(tmp_path)}) is None
    program(tmp_path / "bin", "srun", SRUN.format(more=""))
    assert find_runtime({"PATH": path}) is None
    program(tmp_path / "bin", "singularity", APPTAINER)
    assert find_runtime({"PATH": path}) is Runtime.APPTAINER
    program(tmp_path / "bin", "srun", SRUN.format(more=PYXIS_HELP))
    assert find_runtime({"PATH": path}) is Runtime.PYXIS


@pytest.mark.parametrize(
    ("image", "apptainer", "pyxis"),
    [
        (REFERENCE, f"docker://{REFERENCE}", "nvcr.io#nvidia/pytorch:24.05-py3"),
        ("pytorch/pytorch:2.4", "docker://pytorch/pytorch:2.4", "pytorch/pytorch:2.4"),
        ("python", "docker://python", "python"),
        (
            "docker://quay.io/a/b@sha256:0f",
            "docker://quay.io/a/b@sha256:0f",
            "quay.io#a/b@sha256:0f",
        ),
        ("localhost:5000/a", "docker://localhost:5000/a", "localhost:5000#a"),
        ("/images/a b.sif", "/images/a b.sif", "/images/a b.sif"),
        ("train.sqsh", "train.sqsh", "train.sqsh"),
        ("nvcr.io#nvidia/cuda:12", "docker://nvcr.io#nvidia/cuda:12", "nvcr.io#nvidia/cuda:12"),
    ],
)
def test_image_names(image: str, apptainer: str, pyxis: str) -> None:
    """A reference is spelled as each runtime wants it; a path stays."""
    assert (apptainer_image(image), pyxis_image(image)) == (apptainer, pyxis)


def test_words_for_apptainer() -> None:
    """Folders once each, GPUs where there are any; the command's words stay words. Variables count
    above the image's, and stand in no list of processes."""
    words = contained_argv(
        ["python", "-c", "print('a b'); $(x)"],
        image=REFERENCE,
        program="/usr/bin/apptainer",
        folders=[Path("/run/1"), Path("/work"), Path("/work")],
        working_directory="/work",
        has_gpus=True,
    )
    assert words == (
        "/usr/bin/apptainer", "exec", "--nv", "--bind", "/run/1", "--bind", "/work",
        "--pwd", "/work", f"docker://{REFERENCE}", "python", "-c", "print('a b'); $(x)",
    )  # fmt: skip
    made = contained_environ({"A": "1", "B": "2"}, {"A": "1", "B": "x"}, program=words[0])
    assert made == {"A": "1", "B": "2", "APPTAINERENV_B": "2"}
    made = contained_environ({"B": "2"}, {}, program="/opt/bin/singularity")
    assert made == {"B": "2", "SINGULARITYENV_B": "2"}


def test_folder_that_cannot_be_bound() -> None:
    """A path that would be read as two is refused, not bound wrongly."""
    for bad in ("/data:ro", "/a,/etc"):
        with pytest.raises(LaunchError, match="has a : or a , in it"):
            contained_argv(
                ["x"], image="i", program="p", folders=[Path(bad)], working_directory="/",
                has_gpus=False,
            )  # fmt: skip
        with pytest.raises(LaunchError, match="has a : or a , in it"):
            pyxis_options("i", folders=[Path(bad)], working_directory="/")


def plan(folder: Path, runtime: str | None) -> Plan:
    task = TaskPlan(
        replica="worker-0",
        node=0,
        argv=("python3", "-c", "import os; print('in', os.getcwd(), os.environ['COLOUR'])"),
        env=(("COLOUR", "deep blue"),),
        working_directory=str(folder),
        init=(Step("look", ("sh", "-c", "echo init $COLOUR")),),
        image=REFERENCE,
    )
    return Plan(1, 1, None, 0, (task,), runtime=runtime)


def test_task_becomes_apptainer(tmp_path: Path) -> None:
    """The task's program and its init steps run in the image, where the job does, with the spec's
    variables; on a node without Apptainer the task says so and fails."""
    (tmp_path / "plan.json").write_text(plan(tmp_path, "apptainer").dumps())
    program(tmp_path / "bin", "apptainer", APPTAINER)
    command = [sys.executable, "-m", "hydroslurm.jobs.task", str(tmp_path / "plan.json")]
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    environ = {**os.environ, **slurm, "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "n1"}
    environ["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    exec_in = f"apptainer exec --bind {tmp_path} --pwd {tmp_path} docker://{REFERENCE} "
    lines = done.stdout.splitlines()
    assert lines[0] == f"{exec_in}sh -c echo init $COLOUR"
    assert lines[1] == "init deep blue"
    assert lines[2].startswith(f"{exec_in}python3 -c ")
    assert lines[3] == f"in {tmp_path} deep blue"
    assert len(lines) == 4

    environ["PATH"] = "/bin"
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 126
    assert f"image '{REFERENCE}'" in done.stderr
    assert "neither pyxis (srun --container-image) nor Apptainer" in done.stderr


def test_step_of_pyxis(tmp_path: Path) -> None:
    """srun starts the tasks in the image, with the image's own Python; without pyxis it has none of
    its options."""
    command = srun_command(
        plan(tmp_path, "pyxis"),
        plan_file=tmp_path / "plan.json",
        logs=tmp_path,
        python="/here/python",
    )
    assert "--container-image=nvcr.io#nvidia/pytorch:24.05-py3" in command
    assert f"--container-mounts={tmp_path}:{tmp_path}" in command
    assert f"--container-workdir={tmp_path}" in command
    task = module_command("python3", "hydroslurm.jobs.task", str(tmp_path / "plan.json"))
    assert command[-len(task) :] == task
    command = srun_command(
        plan(tmp_path, "apptainer"), plan_file=tmp_path / "p", logs=tmp_path, python="/here/python"
    )
    assert not any(word.startswith("--container") for word in command)
    assert "/here/python" in command

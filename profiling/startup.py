"""What it costs to begin: Python with the package installed, the command line, a job's first
operator.

`python_start_ratio`: the start of a Python that has the package, which nobody asked for
(HYDROSLURM_PREEMPT is not set), to the start of one that has not. Two bare virtual environments
that differ in the package and its .pth file only; a third one, bare like the first, shows the
noise. `submit_to_first_operator_s`: from the start of `hydroslurm submit job.yaml` to the end of
the first operator in the rank, on a dev cluster of its own; the peer is plain sbatch with srun and
the same script, in the same rounds. The import of torch is part of both. The package's bytecode is
there, as pip leaves it, also where PYTHONDONTWRITEBYTECODE would have each start compile it.
"""

from __future__ import annotations

import compileall
import functools
import itertools
import json
import os
import shutil
import statistics
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path

from harness import Slurm, finish, interleaved, median_ratio, options, scratch
from processes import wait_until

from hydroslurm.devcluster import ClusterSpec, DevCluster

PACKAGE = Path(__file__).resolve().parent.parent / "hydroslurm"
SCRIPT = """
import sys, time, torch
from pathlib import Path
torch.ones(2).sum()
done_ns = time.monotonic_ns()
part = Path(sys.argv[1]).with_suffix(".part")
part.write_text(f"{done_ns}\\n")
part.rename(sys.argv[1])  # who waits for it sees it whole
"""
HELP = "from hydroslurm.cli import main; main()"  # what the program `hydroslurm` is


def make_python(folder: Path, *, with_package: bool) -> Path:
    """A bare virtual environment; returns its Python."""
    venv.create(folder, symlinks=True)
    if with_package:
        (site,) = folder.glob("lib/python*/site-packages")
        nothing = shutil.ignore_patterns("__pycache__", "*.pth")
        shutil.copytree(PACKAGE, site / "hydroslurm", ignore=nothing)
        shutil.copyfile(PACKAGE / "autoload.pth", site / "hydroslurm_autoload.pth")
    return folder / "bin" / "python"


def seconds_of(argv: Sequence[str]) -> float:
    """From the start of a program to its end."""
    environ = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    nowhere = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    begin = time.perf_counter()
    pid = os.posix_spawn(argv[0], argv, environ, file_actions=nowhere)
    _, status = os.waitpid(pid, 0)
    took_s = time.perf_counter() - begin
    if status != 0:
        raise RuntimeError(f"{argv[0]} ended with {os.waitstatus_to_exitcode(status)}")
    return took_s


def python_starts(folder: Path, *, rounds: int) -> dict[str, list[float]]:
    """Seconds of each start: bare, with the package, and bare again."""
    pythons = {
        name: make_python(folder / name, with_package=name == "with")
        for name in ("bare", "with", "again")
    }

    arms = {
        name: functools.partial(seconds_of, [str(python), "-c", ""])
        for name, python in pythons.items()
    }
    interleaved(arms, rounds=3)  # files into the cache
    return interleaved(arms, rounds=rounds)


class Submissions:
    """Submits the same script in two ways, and waits each time until the cluster is idle again."""

    def __init__(self, cluster: DevCluster, folder: Path) -> None:
        self._slurm = Slurm(cluster, folder)
        self._folder = folder
        self._stamps = (folder / f"first-{number}" for number in itertools.count())
        self._script = folder / "first_operator.py"
        self._script.write_text(SCRIPT)

    def spec(self) -> float:
        """Seconds from `hydroslurm submit job.yaml` to the first operator."""
        stamp = next(self._stamps)
        template = {"command": ["python", str(self._script), str(stamp)]}
        file = stamp.with_suffix(".yaml")
        file.write_text(json.dumps({"replicaSpecs": [{"replicas": 1, "template": template}]}))
        program = (sys.executable, "-c", HELP)
        return self._seconds([*program, "submit", "--folder", "runs", str(file)], stamp)

    def sbatch(self) -> float:
        """The same with plain sbatch and srun."""
        stamp = next(self._stamps)
        wrap = f"srun -n1 {sys.executable} {self._script} {stamp}"
        out = str(stamp.with_suffix(".out"))
        return self._seconds(["sbatch", "-n1", "-o", out, "--wrap", wrap], stamp)

    def _seconds(self, argv: list[str], stamp: Path) -> float:
        wait_until(lambda: not self._slurm.run("squeue", "-h"), "the cluster is idle")
        begin_ns = time.monotonic_ns()
        self._slurm.run(*argv)
        wait_until(stamp.exists, f"the first operator of {argv}")
        return (int(stamp.read_text()) - begin_ns) / 1e9


def submissions(folder: Path, *, rounds: int) -> dict[str, list[float]]:
    """Seconds to the first operator, in both ways."""
    with DevCluster.up(ClusterSpec(nodes=1)) as cluster:
        both = Submissions(cluster, folder)
        arms = {"spec": both.spec, "sbatch": both.sbatch}
        if rounds > 1:
            interleaved(arms, rounds=1)  # torch into the cache, the gate built
        return interleaved(arms, rounds=rounds)


def main() -> None:
    chosen = options("What it costs to begin: Python, the command line, a job.")
    compileall.compile_dir(PACKAGE, quiet=1)
    program = [sys.executable, "-c", HELP, "--help"]
    with scratch("startup") as folder:
        starts = python_starts(folder, rounds=10 if chosen.quick else 400)
        helps = [seconds_of(program) for _ in range(3 if chosen.quick else 30)]
        jobs = submissions(folder, rounds=1 if chosen.quick else 12)
    result = {
        "python_start_ratio": median_ratio(starts, "with", "bare"),
        "python_start_ratio_bare_again": median_ratio(starts, "again", "bare"),
        "help_s": statistics.median(helps),
        "submit_to_first_operator_s": statistics.median(jobs["spec"]),
        "sbatch_to_first_operator_s": statistics.median(jobs["sbatch"]),
    }
    finish(chosen, "startup: Python, --help, a job's first operator", result)


if __name__ == "__main__":
    main()

"""What all profiling scripts share: options, a folder, percentiles, interleaving, the environment,
the last line; and Slurm's programs. How to wait and to fork ranks they have from the tests, whose
folder is on the path.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydroslurm
from hydroslurm.core.events import Event, EventKind
from hydroslurm.core.files import new_lines
from hydroslurm.devcluster import DevCluster

PROFILING = Path(__file__).resolve().parent
TESTS = PROFILING.parent / "tests"
sys.path.append(str(TESTS))
SLURM_LIMIT_S = 180.0


def parser(description: str) -> ArgumentParser:
    """With ``--quick`` and ``--json``, which every script takes."""
    made = ArgumentParser(description=description)
    made.add_argument(
        "--quick", action="store_true", help="few rounds: to see that it runs, not how fast it is"
    )
    made.add_argument("--json", action="store_true", help="print the JSON line alone")
    return made


def options(description: str) -> Namespace:
    """``quick`` and ``json``, of a script that takes nothing else."""
    return parser(description).parse_args()


@contextlib.contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A folder that is gone after the block, whatever ranks that end late may still write."""
    prefix = f"hydroslurm-{name}-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextlib.contextmanager
def installed(run_dir: Path) -> Iterator[None]:
    """hydroslurm, as ``hydroslurm.install()`` sets it up."""
    hydroslurm.install(run_dir=run_dir, gate="native")
    try:
        yield
    finally:
        hydroslurm.uninstall()


@contextlib.contextmanager
def bare(run_dir: Path) -> Iterator[None]:
    """Nothing of ours, a moment after something of ours: the caches are as in the other arm."""
    with installed(run_dir):
        pass
    yield


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank, so that the figure is one that was seen; nan of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def p50_p99(name: str, values: Sequence[float]) -> dict[str, float]:
    """``{name}_p50`` and ``{name}_p99``; the unit is in the name."""
    return {f"{name}_p50": percentile(values, 50), f"{name}_p99": percentile(values, 99)}


def time_interleaved(
    step: Callable[[], object],
    arms: Mapping[str, Callable[[], AbstractContextManager[object]]],
    *,
    rounds: int,
    segment_s: float,
    settle: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds per step of each arm in each round.

    A round of :func:`interleaved` runs every arm for ``segment_s``. Entering an arm, and a third
    more steps to warm up, are not timed.

    Args:
        settle: waits until what the steps have begun is done; called before the clock is read.
    """
    for _ in range(5):
        step()
    settle()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < 0.1:
        step()
        count += 1
    settle()
    steps = max(1, round(segment_s * count / (time.perf_counter() - begin)))

    def timed(arm: Callable[[], AbstractContextManager[object]]) -> float:
        with arm():
            for _ in range(max(1, steps // 3)):
                step()
            settle()
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            settle()
            return (time.perf_counter() - begin) / steps

    timed_arms = {name: functools.partial(timed, arm) for name, arm in arms.items()}
    return interleaved(timed_arms, rounds=rounds)


def interleaved(arms: Mapping[str, Callable[[], float]], *, rounds: int) -> dict[str, list[float]]:
    """What each arm gives in each round; every round begins with another arm."""
    seen: dict[str, list[float]] = {name: [] for name in arms}
    for index in range(rounds):
        first = index % len(arms)
        for name in [*list(arms)[first:], *list(arms)[:first]]:
            seen[name].append(arms[name]())
    return seen


def median_ratio(seen: Mapping[str, Sequence[float]], arm: str, base: str) -> float:
    """The median over the rounds of arm / base, both of the same round."""
    return statistics.median(a / b for a, b in zip(seen[arm], seen[base], strict=True))


class EventTail:
    """Reads what is appended to a rank's event file, from another process."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._pending: list[Event] = []

    def until(self, *kinds: EventKind, limit_s: float = 30.0) -> Event:
        """The next event of one of these kinds; the ones before it are let go."""
        deadline = time.monotonic() + limit_s
        while True:
            while self._pending:
                event = self._pending.pop(0)
                if event.kind in kinds:
                    return event
            if time.monotonic() > deadline:
                wanted = " or ".join(kind.value for kind in kinds)
                raise TimeoutError(f"no {wanted} in {self._path} within {limit_s:g} s")
            lines, self._offset = new_lines(self._path, self._offset)
            self._pending.extend(map(Event.from_json, lines))
            if not self._pending:
                time.sleep(0.001)


@dataclass(frozen=True)
class Slurm:
    """Slurm's programs on a dev cluster.

    Attributes:
        folder: where they run.
        environ: of theirs, and of the jobs that they submit.
    """

    cluster: DevCluster
    folder: Path
    environ: Mapping[str, str] = field(default_factory=dict)

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a program, whose output is text."""
        environ = {**self.cluster.child_environ(), "OMP_NUM_THREADS": "1", **self.environ}
        environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
        return subprocess.Popen(
            command,
            env=environ,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str) -> str:
        """What it printed."""
        return finished(self.start(*command))

    def submit(self, *words: str) -> str:
        """``sbatch`` with these options and arguments; the job's id."""
        return self.run("sbatch", "--parsable", *words).split(";")[0]

    def send_urgent_job(self, node: str) -> subprocess.Popen[str]:
        """It wants a whole node for a moment; the program ends with it."""
        options = ("--partition=urgent", f"--nodelist={node}", "--exclusive", "--time=1")
        return self.start("srun", *options, "true")

    def cancel(self, job_id: str) -> None:
        """At once: a save for this stop would help nobody."""
        for choice in (("--signal=KILL", "--full"), ()):
            self.start("scancel", *choice, job_id).communicate(timeout=SLURM_LIMIT_S)


def finished(command: subprocess.Popen[str]) -> str:
    """Wait for a program; as :meth:`Slurm.run`."""
    out, said = command.communicate(timeout=SLURM_LIMIT_S)
    if command.returncode != 0:
        raise RuntimeError(f"{command.args!r} ended with {command.returncode}: {said.strip()}")
    return out.strip()


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    import torch

    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_count": os.cpu_count(),
        "cpu_model": _cpu_model(),
        "kernel": platform.release(),
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def finish(chosen: Namespace, title: str, result: Mapping[str, Any]) -> None:
    """Print the table, unless only JSON is wanted, and the JSON line last."""
    result = rounded(result)
    if not chosen.json:
        print(title)
        width = max(len(key) for key in result)
        for key, value in result.items():
            print(f"  {key:<{width}}  {value}")
    script = str(Path(sys.argv[0]).resolve().relative_to(PROFILING))
    line = {"script": script, "quick": chosen.quick, **result}
    print(json.dumps({**line, "environment": environment()}), flush=True)


def rounded(value: Any) -> Any:
    """Five digits, and None for what is not a number."""
    if isinstance(value, Mapping):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.5g}")
    return value

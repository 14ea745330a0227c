"""What watching costs: `list` and `top` of 1,000 jobs of 8 ranks.

Their run folders are built, half of them with a spec, and their Slurm is a squeue that prints what
it was given: the figures are of reading run folders, at sizes that no test cluster has. While `top`
looks, every rank goes on writing its status, once each heartbeat of 10 s.

`list_ms_per_job` is the processor time of the whole command; `top_cpu_s` that of the dearest look
but the first, which has the start of the program in it; `top_looks_until_complete` says how many
looks it takes until all ranks are there. Processor times include squeue's.
"""

from __future__ import annotations

import contextlib
import getpass
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import PROFILING, finish, options, scratch

from hydroslurm.core.events import clocks
from hydroslurm.core.files import write_atomically
from hydroslurm.core.proc import boot_id
from hydroslurm.core.rundir import RunDir, comment_for
from hydroslurm.core.status import Moment, RankStatus
from hydroslurm.jobs.plan import Submission, write_submission
from hydroslurm.jobs.spec.reading import dumps, loads
from hydroslurm.jobs.supervisor.attempts import Attempts, Ending
from hydroslurm.jobs.supervisor.conditions import add_condition

HYDROSLURM = [sys.executable, "-m", "hydroslurm.cli"]
RECORDED = PROFILING.parent / "tests/slurm/recorded/22.05"
RANKS = 8
PREEMPTIONS = 5
"""Of each job so far."""
EVERY_S = 5.0
QUICK_EVERY_S = 0.5
HEARTBEAT_S = 10.0
_TICKS = os.sysconf("SC_CLK_TCK")
_SPEC = """
name: built
runPolicy: {backoffLimit: 3}
replicaSpecs:
- {type: worker, replicas: 8, template: {command: [python, train.py], resources: {cpus: 1}}}
"""


def build(folder: Path, count: int) -> tuple[RunDir, ...]:
    """Write the run folders of so many jobs."""
    folder.mkdir()
    runs = tuple(RunDir(folder / f"run-{number}") for number in range(count))
    for number, run in enumerate(runs):
        run.create()
        _describe(run, number, with_spec=number % 2 == 0)
        for rank in range(RANKS):
            run.rank_events(rank).touch(mode=0o600)
            write_status(run, rank, number, step=1000)
    return runs


def _describe(run: RunDir, number: int, *, with_spec: bool) -> None:
    intent = Submission("built", "train.py", job_id=str(number + 1))
    if with_spec:
        intent = replace(intent, replicas=RANKS, backoff_limit=3)
        job = loads(_SPEC, name="job.yaml", folder=run.root).job
        run.job_yaml.write_text(dumps(job))
        attempts = Attempts(run.starts_jsonl)
        for count in range(PREEMPTIONS):
            attempts.end(attempts.begin(count), Ending.PREEMPTED)
            add_condition(run.conditions_jsonl, "Running", restart_count=count)
            add_condition(run.conditions_jsonl, "Preempted", restart_count=count)
        attempts.begin(PREEMPTIONS)
        add_condition(run.conditions_jsonl, "Running", restart_count=PREEMPTIONS)
    write_submission(run, intent)


def write_status(run: RunDir, rank: int, number: int, *, step: int) -> None:
    """As the rank of such a job would."""
    now = Moment(*clocks())
    status = RankStatus(
        rank=rank,
        state="running",
        since=now,
        started=now,
        as_of=now,
        host=os.uname().nodename,
        boot_id=boot_id(),
        pid=1000 + rank,
        job_id=number + 1,
        restart_count=PREEMPTIONS,
        pauses=2,
        park_us=90.0,
        world_size=RANKS,
        step=step,
        step_since=now,
        steps_per_s=1.5,
        heartbeat_s=HEARTBEAT_S,
        saver="attempt_began",
        saver_restart_count=PREEMPTIONS,
        attempt_step=500,
        attempt_began=now,
        attempt_restart_count=PREEMPTIONS,
        committed_step=900,
        committed=now,
        save_s=0.5,
        preempted=tuple((count, now.epoch_ns) for count in range(PREEMPTIONS)),
    )
    write_atomically(run.rank_status(rank), status.to_json())


def slurm_of(runs: tuple[RunDir, ...], folder: Path) -> dict[str, str]:
    """An environment whose Slurm knows these jobs: programs that print one answer, in the form of
    22.05.8."""
    folder.mkdir()
    answer = json.loads((RECORDED / "squeue.json").read_text())
    first = answer["jobs"][0]
    now_s = int(time.time())
    answer["jobs"] = [
        {
            **first,
            "job_id": number + 1,
            "user_name": getpass.getuser(),
            "partition": "low",
            "comment": comment_for(run),
            "restart_cnt": PREEMPTIONS,
            "start_time": now_s - 600,
            "end_time": now_s + 36000,
        }
        for number, run in enumerate(runs)
    ]
    (folder / "squeue.json").write_text(json.dumps(answer))
    config, partitions = RECORDED / "show_config.txt", RECORDED / "show_partition.txt"
    for name, text in {
        "squeue": f"exec cat {folder}/squeue.json",
        "scontrol": f'case "$*" in *config*) cat {config};; *) cat {partitions};; esac',
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o700)
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    environ.pop("SLURM_CONF", None)
    return {**environ, "HYDROSLURM_SLURM_BACKEND": "commands"}


@contextlib.contextmanager
def heartbeats(runs: tuple[RunDir, ...]) -> Iterator[None]:
    """Each rank replaces its status once every ``HEARTBEAT_S``, evenly over time."""
    end = threading.Event()

    def write() -> None:
        for step in itertools.count(1000, 15):
            begin_s = time.monotonic()
            for number, run in enumerate(runs):
                for rank in range(RANKS):
                    write_status(run, rank, number, step=step)
                due_s = begin_s + HEARTBEAT_S * (number + 1) / len(runs)
                if end.wait(max(0.0, due_s - time.monotonic())):
                    return

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def list_cpu_s(environ: Mapping[str, str]) -> float:
    """CPU seconds of one ``list``, with those of Slurm's programs."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*HYDROSLURM, "list"], env=environ, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def looks(
    environ: Mapping[str, str], *, jobs: int, count: int, every_s: float
) -> Iterator[tuple[float, bool]]:
    """CPU seconds of each of the views of one ``top``, and whether all ranks are in it."""
    command = [*HYDROSLURM, "top", "--json", "-n", str(every_s)]
    used_s = 0.0
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        for _ in range(count):
            rows = [json.loads(top.stdout.readline()) for _ in range(jobs)]
            complete = all(row["ranks"] == RANKS and row["parked"] == 0 for row in rows)
            now_s = _cpu_s(top.pid)
            yield now_s - used_s, complete and all(row["step"] for row in rows)
            used_s = now_s
        top.terminate()
        top.stdout.read()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS


def measure(runs: tuple[RunDir, ...], environ: Mapping[str, str], *, quick: bool) -> dict[str, Any]:
    times, every_s = (1, QUICK_EVERY_S) if quick else (3, EVERY_S)
    list_cpu_s(environ)  # files into the cache
    list_s = statistics.median(list_cpu_s(environ) for _ in range(times))
    with heartbeats(runs):
        seen = list(looks(environ, jobs=len(runs), count=2 + times, every_s=every_s))
    complete = [is_complete for _, is_complete in seen]
    return {
        "jobs": len(runs),
        "ranks": RANKS,
        "list_ms_per_job": 1000 * list_s / len(runs),
        "top_looks_until_complete": complete.index(True) + 1 if True in complete else None,
        "top_cpu_s": max(cpu_s for cpu_s, _ in seen[1:]),
    }


def main() -> None:
    chosen = options("What list and top of made-up jobs cost.")
    with scratch("built") as folder:
        runs = build(folder / "jobs", 20 if chosen.quick else 1000)
        result = measure(runs, slurm_of(runs, folder / "programs"), quick=chosen.quick)
    finish(chosen, "built_runs: list and top of made-up jobs", result)


if __name__ == "__main__":
    main()

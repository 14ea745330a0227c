"""What watching costs: `hydroslurm top` and `hydroslurm status` at 10, 100 and 1,000 jobs.

Each size has a dev cluster of its own, with an array of so many sleeping jobs that really run (on
nodes that claim more CPUs than there are), half of them with a run folder, into which one event per
job and second goes on being written. Counted are slurmctld's requests (sdiag), and the CPU seconds
and memory of the watching program and of the programs that it runs. The cost of an interval is the
median of three means, each over a third of the intervals (the kernel counts in ticks of 10 ms); the
start of the program, which asks for the site's settings too, is apart.

`growth_ratio`: the cost at the largest size to that at the smallest, by the ratio of their sizes: 1
is a cost that grows as the jobs do, less is better.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import pty
import re
import resource
import statistics
import struct
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import finish, options, scratch
from processes import wait_until

from hydroslurm.core.dates import clocks
from hydroslurm.core.events import Event, EventKind, EventLog
from hydroslurm.core.rundir import RunDir, of_job
from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.runtime.status_writer import StatusWriter

HYDROSLURM = [sys.executable, "-m", "hydroslurm.cli"]
EVERY_S = 1.0
PAUSES = 50
"""That each run folder has at the beginning: 300 events, 70 kB."""
LIMIT_S = 300.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Writers:
    """The ranks of the jobs with a run folder: events and statuses, as if they trained."""

    def __init__(self, folder: Path, job_ids: list[int]) -> None:
        self._step = 0
        self._end = threading.Event()
        self._ranks = [(job_id, of_job(job_id, work_dir=folder)) for job_id in job_ids]
        self._logs = [EventLog(run.rank_events(0)) for _, run in self._ranks]
        self._statuses = {
            job_id: StatusWriter(run.rank_status(0), every_s=1.0) for job_id, run in self._ranks
        }
        for (job_id, run), log in zip(self._ranks, self._logs, strict=True):
            self._begin(job_id, run, log)
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        for log in self._logs:
            log.close()

    def _begin(self, job_id: int, run: RunDir, log: EventLog) -> None:
        run.create()
        self._event(log, job_id, EventKind.INSTALLED)
        self._event(log, job_id, EventKind.ATTEMPT_BEGAN, attempt=1, step=0)
        for pause in range(1, PAUSES + 1):
            stamps = {"pause": pause, "requested_mono_ns": time.monotonic_ns()}
            self._event(log, job_id, EventKind.SIGNAL_RECEIVED, signal="SIGUSR1", count=1)
            self._event(log, job_id, EventKind.GATE_CLOSED, causes=["user"], **stamps)
            self._event(log, job_id, EventKind.FIRST_OPERATOR_HELD, operator="aten::mm", **stamps)
            self._event(log, job_id, EventKind.PARKED, park_us=90.0, causes=["user"], **stamps)
            self._event(log, job_id, EventKind.RESUMED, parked_s=1.0, causes=[], **stamps)
            self._event(log, job_id, EventKind.FIRST_OPERATOR_RELEASED, resume_us=70.0, **stamps)

    def _write(self) -> None:
        """Each job once a second, not all at one moment."""
        while not self._end.is_set():
            self._step += 1
            for (job_id, _), log in zip(self._ranks, self._logs, strict=True):
                data = {"tier": "durable", "checkpoint_step": self._step, "seconds": 0.5}
                self._event(log, job_id, EventKind.SAVE_COMMITTED, **data)
                self._statuses[job_id].write(self._step, at_once=True)
                if self._end.wait(1.0 / len(self._ranks)):
                    return

    def _event(self, log: EventLog, job_id: int, kind: EventKind, **data: object) -> None:
        mono_ns, epoch_ns = clocks()
        event = Event(kind, mono_ns, epoch_ns, job_id=job_id, step=self._step, data=data)
        log.append(event)
        self._statuses[job_id].note(event)


@dataclass(frozen=True)
class Cost:
    """Of one interval, or of one run of a program."""

    rpcs: float
    cpu_s: float
    rss_mb: float = 0.0


def requests(cluster: DevCluster) -> int:
    """How many requests slurmctld has had from programs, sdiag's own left out."""
    told = cluster.run(["sdiag"]).stdout
    part = told.partition("statistics by message type")[2].partition("statistics by user")[0]
    found = re.findall(r"(REQUEST_\w+)\s+\(\s*\d+\) count:(\d+)", part)
    return sum(int(count) for name, count in found if name in _ASKED)


_ASKED = {
    "REQUEST_JOB_INFO",
    "REQUEST_JOB_INFO_SINGLE",
    "REQUEST_JOB_USER_INFO",
    "REQUEST_JOB_STEP_INFO",
    "REQUEST_NODE_INFO",
    "REQUEST_NODE_INFO_SINGLE",
    "REQUEST_PARTITION_INFO",
    "REQUEST_BUILD_INFO",
    "REQUEST_ASSOC_MGR_INFO",
}


def cpu_s(pid: int) -> float:
    """Of a process and of those of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS


def rss_mb(pid: int) -> float:
    """The most that it ever held."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def watch_in_pipe(cluster: DevCluster, jobs: int, *, intervals: int) -> Cost:
    """`top --json` for some intervals, from its second view on."""
    command = [*HYDROSLURM, "top", "--json", "-n", str(EVERY_S)]
    marks: list[float] = []
    with subprocess.Popen(
        command, env=cluster.child_environ(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for view in range(intervals + 2):
            for _ in range(jobs):
                process.stdout.readline()
            # the whole view has been read, and it sleeps until the next request
            if view == 1:
                before = requests(cluster)
            if view >= 1:
                marks.append(cpu_s(process.pid))
        made = requests(cluster) - before
        memory = rss_mb(process.pid)
        process.terminate()  # a shell in the background has SIGINT ignored
        process.stdout.read()
    return Cost(made / intervals, _per_interval(marks), memory)


def _per_interval(marks: list[float]) -> float:
    third = (len(marks) - 1) // 3
    used = (marks[n + third] - marks[n] for n in range(0, 3 * third, third))
    return statistics.median(used) / third


def watch_in_terminal(cluster: DevCluster, *, intervals: int) -> Cost:
    """`top` with its screen, in a terminal of 80 by 24."""
    parent, child = pty.openpty()
    import fcntl
    import termios

    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environ = {**cluster.child_environ(), "TERM": "xterm-256color"}
    command = [*HYDROSLURM, "top", "-n", str(EVERY_S)]
    process = subprocess.Popen(command, env=environ, stdin=child, stdout=child, stderr=child)
    os.close(child)
    drain = threading.Thread(target=_read_all, args=(parent,), daemon=True)
    drain.start()
    try:
        first = requests(cluster)
        wait_until(
            lambda: requests(cluster) >= first + 5, "a second look"
        )  # three for the settings
        before, before_s = requests(cluster), cpu_s(process.pid)
        wait_until(lambda: requests(cluster) >= before + intervals, "the intervals")
        made, used_s = requests(cluster) - before, cpu_s(process.pid) - before_s
        memory = rss_mb(process.pid)
    finally:
        with contextlib.suppress(OSError):
            os.write(parent, b"q")
        process.wait(60)
        drain.join()
        os.close(parent)
    return Cost(made, used_s / made, memory)


def _read_all(fd: int) -> None:
    with contextlib.suppress(OSError):  # the other end is closed
        while os.read(fd, 65536):
            pass


def run_status(cluster: DevCluster, *, times: int) -> Cost:
    """`status` of all jobs, from its start to its end."""
    before, costs = requests(cluster), []
    for _ in range(times):
        begin = resource.getrusage(resource.RUSAGE_CHILDREN)
        with subprocess.Popen(
            [*HYDROSLURM, "status"], env=cluster.child_environ(), stdout=subprocess.DEVNULL
        ):
            pass
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        costs.append(end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime)
    return Cost((requests(cluster) - before) / times, statistics.median(costs))


@contextlib.contextmanager
def sleeping_jobs(count: int, folder: Path) -> Iterator[DevCluster]:
    """A cluster with an array of so many jobs, all of them running."""
    spec = ClusterSpec(nodes=4, cpus_per_node=count // 4 + 2, profile="requeue")
    with DevCluster.up(spec) as cluster:
        # without accounting of each task every 30 s: a thousand would look at all of /proc then
        words = ["-n1", f"--array=0-{count - 1}", "--acctg-freq=0", "-o", "/dev/null"]
        cluster.run(["sbatch", *words, "-D", str(folder), "--wrap", "exec sleep 3600"])
        what = f"{count} running jobs"
        wait_until(lambda: len(running(cluster)) == count, what, limit_s=LIMIT_S)
        yield cluster


def running(cluster: DevCluster) -> list[int]:
    """The raw ids of the jobs that run."""
    command = ["squeue", "-h", "-r", "-t", "R", "-u", getpass.getuser(), "-o", "%A"]
    return sorted(map(int, cluster.run(command).stdout.split()))


def measure(chosen: Namespace) -> dict[str, Any]:
    sizes = (10, 100) if chosen.quick else (10, 100, 1000)
    intervals = 3 if chosen.quick else 15
    result: dict[str, Any] = {}
    seen: dict[str, list[Cost]] = {"top": [], "screen": [], "status": []}
    for size in sizes:
        with (
            scratch("scale", chosen) as place,
            sleeping_jobs(size, place) as cluster,
        ):
            writers = Writers(place, running(cluster)[::2])
            try:
                seen["top"].append(watch_in_pipe(cluster, size, intervals=intervals))
                seen["screen"].append(watch_in_terminal(cluster, intervals=intervals))
                seen["status"].append(run_status(cluster, times=2 if chosen.quick else 5))
                result[f"jobs_running_{size}"] = len(running(cluster))
            finally:
                writers.close()
    growth = sizes[-1] // sizes[0]
    both = [*seen["top"], *seen["screen"]]
    result["rpcs_per_interval"] = max(cost.rpcs for cost in seen["top"])
    result["rpcs_per_status"] = max(cost.rpcs for cost in seen["status"])
    for name, costs in seen.items():
        for size, cost in zip(sizes, costs, strict=True):
            result[f"{name}_cpu_s_per_interval_{size}"] = cost.cpu_s
            if cost.rss_mb:
                result[f"{name}_rss_mb_{size}"] = cost.rss_mb
        result[f"{name}_growth_ratio"] = costs[-1].cpu_s / (growth * costs[0].cpu_s)
    result["growth_ratio"] = max(result[f"{name}_growth_ratio"] for name in seen)
    result["rss_mb"] = max(cost.rss_mb for cost in both)
    result["interval_s"] = EVERY_S
    result["intervals"] = intervals
    return result


def main() -> None:
    chosen = options("What watching 10, 100 and 1,000 jobs costs.")
    finish(chosen, "scale: hydroslurm top and status", measure(chosen))


if __name__ == "__main__":
    main()

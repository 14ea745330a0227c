"""What `hydroslurm report` takes of a run of 8 ranks with a million events, most of them of pauses.

`report_s_1m_events`: from the start of the command to its end, tables, pictures, page and trace
included; `report_peak_mb_1m_events`: the most memory that all processes of the command held. The
run is made up as the tests' runs are: what ranks write is known, and a real run of a million events
takes days. Slurm is not asked.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import finish, options, scratch
from processes import descendants
from report.ranklog import RankLog

from hydroslurm.core.events import EventKind
from hydroslurm.core.rundir import RunDir

LIMIT_S = 300.0


RANKS = 8
ATTEMPTS = 3
"""Of each rank; each but the last is preempted and requeued."""
SAVES = 400
"""Periodic ones, of each attempt."""


def make_run(folder: Path, pauses: int) -> int:
    """Write the run's folder, with so many pauses of each attempt; returns the number of events."""
    run = RunDir(folder).create()
    return sum(_make_rank(run, rank, pauses) for rank in range(RANKS))


def _make_rank(run: RunDir, rank: int, pauses: int) -> int:
    """All attempts of one rank; returns the number of its events."""
    chance, at_s, count = random.Random(rank), 0.0, 0
    for attempt in range(1, ATTEMPTS + 1):
        log = RankLog(rank, 1000 * attempt + rank, attempt - 1, host=f"n{rank // 4}")
        log.trains(at_s, attempt=attempt, step=log.step or 0)
        log.add(EventKind.RANKS_JOINED, at_s + 2.6, world_size=RANKS, joined_s=0.4)
        at_s += 4.0
        for number in range(1, pauses + 1):
            at_s += 2.0
            log.step = 20 * number
            _pause(log, chance, at_s + 0.0003 * (rank > 0))
            if number % max(1, pauses // SAVES) == 0:
                at_s += 2.0
                _save(log, chance, at_s)
        at_s += 5.0
        if attempt < ATTEMPTS:
            log.stop(at_s, step=20 * pauses + 1, attempt=attempt)
        else:
            log.add(EventKind.RUN_FINISHED, at_s, attempt=attempt)
            log.add(EventKind.ATTEMPT_ENDED, at_s, attempt=attempt, ending="finished")
            log.uninstalled(at_s + 0.4)
        at_s += 9.4
        log.write(run)
        count += len(log.events)
    return count


def _pause(log: RankLog, chance: random.Random, at_s: float) -> None:
    """Slurm pauses the first rank, and that one the others; behind ``parked`` all say that all
    are."""
    log.pause(
        at_s,
        cause="slurm" if log.rank == 0 else "peers",
        park_us=40 * chance.lognormvariate(0.5, 0.8),
        resume_us=30 * chance.lognormvariate(0.2, 0.5),
    )
    agreed = {"of_ranks": [0], "in_flight": 0, "rounds": 2, "let_through": 0, "agreed_us": 5.5e3}
    log.add(EventKind.ALL_PARKED, at_s + 0.006, **agreed)
    log.events.insert(-3, log.events.pop())


def _save(log: RankLog, chance: random.Random, at_s: float) -> None:
    save = {"checkpoint_step": log.step, "save_kind": "periodic", "reason": ""}
    took_s = 0.05 * chance.lognormvariate(0.3, 0.4)
    for kind, after_s in (
        (EventKind.SAVE_STARTED, 0.0),
        (EventKind.SAVE_STAGED, 0.01),
        (EventKind.SAVE_COMMITTED, took_s),
    ):
        log.add(kind, at_s + after_s, **save, state_bytes=741344, seconds=after_s)


def report(folder: Path, *, look: bool = False) -> tuple[float, float]:
    """Seconds and peak MB (10^6 bytes) of one ``hydroslurm report``: of all its processes together,
    what they share counted once (PSS), looked at every 0.1 s. Looking takes time of its own."""
    argv = [sys.executable, "-m", "hydroslurm.cli", "report", "--no-slurm", str(folder)]
    peak_bytes = 0
    with tempfile.TemporaryFile() as said:
        begin_s = time.perf_counter()
        child = subprocess.Popen(argv, stdout=said, stderr=subprocess.STDOUT)
        while True:
            try:
                child.wait(0.1 if look else LIMIT_S)
                break
            except subprocess.TimeoutExpired:
                family = [child.pid, *descendants(child.pid)]
                peak_bytes = max(peak_bytes, sum(map(_pss_bytes, family)))
        took_s = time.perf_counter() - begin_s
        said.seek(0)
        if child.returncode != 0:
            raise RuntimeError(said.read().decode(errors="replace")[-2000:])
    return took_s, peak_bytes / 1e6


def _pss_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        found = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
        return int(found[1]) * 1024 if found else 0
    return 0


def main() -> None:
    chosen = options("What hydroslurm report takes of a long run.")
    with scratch("report") as folder:
        run = folder / "run"
        events = make_run(run, 50 if chosen.quick else 6600)
        report(run)  # files into the cache
        took_s, _ = report(run)
        _, peak_mb = report(run, look=True)
        figures = json.loads(RunDir(run).figures_json.read_text())
    result = {
        "report_s_1m_events": took_s,
        "report_peak_mb_1m_events": peak_mb,
        "events": events,
        "pauses": figures["pauses"],
        "requeues": figures["restarts"],
    }
    finish(chosen, "report_speed: hydroslurm report of a made-up run", result)


if __name__ == "__main__":
    main()

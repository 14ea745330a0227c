"""What `hydroslurm report` takes of a run of 8 ranks with a million events, most of them of pauses.

`report_s_1m_events`: from the start of the command to its end, tables, pictures, page and trace
included; `report_peak_mb_1m_events`: the most memory that all processes of the command held. The
run is made up here, through the types that a rank writes with: what ranks write is known, and a
real run of a million events takes days. Slurm is not asked.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import finish, options, scratch
from processes import descendants

from hydroslurm.core.events import Event, EventKind, EventLog
from hydroslurm.core.rundir import RunDir

LIMIT_S = 300.0
EPOCH_NS = 1_700_000_000 * 10**9


@dataclass(frozen=True)
class Plan:
    """A run to be made up.

    Attributes:
        attempts: of each rank; each but the last is preempted and requeued.
        pauses: of each attempt.
        saves: periodic ones, of each attempt.
    """

    ranks: int
    attempts: int
    pauses: int
    saves: int = 4


class Rank:
    """Writes what one rank of such a run would; times are seconds since the run's begin."""

    def __init__(self, plan: Plan, run: RunDir, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self._log = EventLog(run.rank_events(rank))
        self._random = random.Random(rank)
        self._attempt = 0
        self._step = 0
        self.events = 0

    def write(self) -> None:
        """All attempts."""
        at_s = 0.0
        for attempt in range(self._plan.attempts):
            self._attempt = attempt
            at_s = self._one_attempt(at_s, last=attempt == self._plan.attempts - 1) + 9.0
        self._log.close()

    def _one_attempt(self, at_s: float, *, last: bool) -> float:
        attempt = self._attempt + 1
        self._tell("installed", at_s, gate="native", granularity="every operator")
        self._tell("ranks_joined", at_s + 0.4, world_size=self._plan.ranks, joined_s=0.4)
        self._tell("attempt_began", at_s + 3.0, attempt=attempt, step=self._step)
        self._step += 1
        self._tell("first_step", at_s + 3.5, attempt=attempt)
        at_s += 4.0
        for number, saves in self._order():
            at_s += 2.0
            self._step += 20
            if saves:
                self._save(at_s, "periodic")
            else:
                self._pause(at_s, number)
        at_s += 5.0
        if last:
            self._tell("run_finished", at_s, attempt=attempt)
            self._tell("attempt_ended", at_s, attempt=attempt, ending="finished")
        else:
            self._stop(at_s, attempt)
        self._tell("uninstalled", at_s + 0.4)
        return at_s + 0.4

    def _order(self) -> Iterator[tuple[int, bool]]:
        """Pauses, and between them the saves."""
        every = max(1, self._plan.pauses // max(1, self._plan.saves))
        for number in range(1, self._plan.pauses + 1):
            yield number, False
            if number % every == 0:
                yield number, True

    def _pause(self, at_s: float, number: int) -> None:
        us, mine = 1e-6, self._rank == 0
        park_us = 40 * self._random.lognormvariate(0.5, 0.8)
        causes = ["slurm"] if mine else ["peers"]
        if not mine:
            at_s += 300 * us
        request = {"pause": number, "requested_mono_ns": self._mono_ns(at_s)}
        if mine:
            self._tell("signal_received", at_s, signal="SIGTSTP", sender_pid=1, count=1)
        self._tell("gate_closed", at_s + 9 * us, causes=causes, **request)
        held = {"operator": "aten::addmm", "phase": "forward", "tid": 1}
        self._tell("first_operator_held", at_s + park_us * us, pause=number, **held)
        parked = {"park_us": park_us, "held": 1, "quiet": 0, "causes": causes}
        self._tell("parked", at_s + park_us * us, **request, **parked)
        agreed = {"of_ranks": [0], "in_flight": 0, "rounds": 2, "let_through": 0}
        self._tell("all_parked", at_s + 0.006, agreed_us=5.5e3, **agreed)
        back_s = at_s + 1.0
        back = {"pause": number, "requested_mono_ns": self._mono_ns(back_s)}
        self._tell("resumed", back_s + 5 * us, parked_s=1.0, held=1, passed=0, causes=[], **back)
        resume_us = 30 * self._random.lognormvariate(0.2, 0.5)
        self._tell("first_operator_released", back_s + resume_us * us, resume_us=resume_us, **back)

    def _save(self, at_s: float, kind: str) -> None:
        save: dict[str, Any] = {"checkpoint_step": self._step, "save_kind": kind, "reason": ""}
        took_s = 0.05 * self._random.lognormvariate(0.3, 0.4)
        for name, after_s in (
            ("save_started", 0.0),
            ("save_staged", 0.01),
            ("save_committed", took_s),
        ):
            more = {"state_bytes": 741344, "seconds": after_s}
            self._tell(name, at_s + after_s, **save, **more)

    def _stop(self, at_s: float, attempt: int) -> None:
        request = {"signal": "SIGTERM", "requested_mono_ns": self._mono_ns(at_s)}
        self._tell("stop_requested", at_s, sender_pid=1, **request)
        self._tell("stop_reason", at_s + 0.02, reason="preempted", message="preempted by a job")
        self._tell("stop_agreed", at_s + 0.03, of_rank=0, signal="SIGTERM", place=self._step)
        self._step += 1
        self._tell("safe_point", at_s + 0.05, attempt=attempt, waited_us=5e4)
        self._save(at_s + 0.06, "stop")
        if self._rank == 0:
            self._tell("requeue_asked", at_s + 0.3, job_id=7)
            self._tell("requeued", at_s + 0.32, job_id=7, requeue_us=2e4)
        self._tell("attempt_ended", at_s + 0.33, attempt=attempt, ending="preempted")

    def _tell(self, kind: str, at_s: float, **data: Any) -> None:
        mono_ns = self._mono_ns(at_s)
        self._log.append(
            Event(
                kind=EventKind(kind),
                mono_ns=mono_ns,
                epoch_ns=EPOCH_NS + mono_ns + self._random.randrange(1000, 80_000),
                rank=self._rank,
                job_id=7,
                restart_count=self._attempt,
                pid=1000 * (self._attempt + 1) + self._rank,
                host=f"n{self._rank // 4}",
                step=self._step,
                data=data,
            )
        )
        self.events += 1

    def _mono_ns(self, at_s: float) -> int:
        return round((5000.0 + at_s) * 1e9)


def make_run(plan: Plan, folder: Path) -> int:
    """Write the run's folder; returns the number of events."""
    run = RunDir(folder).create()
    ranks = [Rank(plan, run, rank) for rank in range(plan.ranks)]
    for rank in ranks:
        rank.write()
    return sum(rank.events for rank in ranks)


def report(folder: Path, *, look: bool = False) -> tuple[float, float]:
    """Seconds and peak MB (10^6 bytes) of one ``hydroslurm report``: of all its processes together,
    what they share counted once (PSS), looked at every 0.1 s. Looking takes time of its own.

    Raises:
        RuntimeError: it failed; with what it said.
    """
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
    plan = Plan(ranks=8, attempts=3, pauses=50 if chosen.quick else 6600, saves=400)
    with scratch("report", chosen) as folder:
        run = folder / "run"
        events = make_run(plan, run)
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

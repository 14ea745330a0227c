"""Plays the rounds that ``plans`` draws: attempt after attempt, until the run has finished."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from faults.plans import Fault, Plan
from faults.verdicts import AttemptSeen, Complaint, check_attempt, check_last
from kit.team import coordinator_of
from processes import Child, descendants
from zygote import forked

from hydroslurm.core.rundir import RunDir

EPOCHS = 5
TIMEOUT_S = 60
"""Of collectives: far longer than any fault lasts."""
HANG_S = 200.0
"""An attempt that lasts longer hangs. One on an idle machine takes a second or two."""
START_S = 240.0
"""The crew loads torch, on a machine that may have much else to do."""
LINGER_S = 2.0
"""After the end of the first rank the rest is told to stop, as srun does it."""
LOOK_S = 0.02
GRACE_S = 0.3
"""Between SIGTSTP and SIGSTOP; 2 s with Slurm."""


@dataclass(frozen=True)
class Outcome:
    """What a round has come to."""

    plan: Plan
    complaints: tuple[Complaint, ...]
    attempts: tuple[AttemptSeen, ...]

    @property
    def said(self) -> str:
        """By all ranks in all attempts."""
        told = (
            f"--- attempt {number}\n{attempt.said}"
            for number, attempt in enumerate(self.attempts, 1)
        )
        return "\n".join(told)


@contextlib.contextmanager
def players(folder: Path) -> Iterator[Player]:
    """Everything that is needed to play rounds; what they leave behind lies in the folder."""
    environ = {"PYTHONPATH": str(Path(__file__).resolve().parent.parent), "OMP_NUM_THREADS": "1"}
    code = "from faults.worker import main\nmain()\n"
    with forked(code, folder, environ=environ) as crew:
        crew.expect("ready", limit_s=START_S)
        yield Player(crew, folder)


class Player:
    """Plays rounds one after the other."""

    def __init__(self, crew: Child, folder: Path) -> None:
        self._crew = crew
        self._folder = folder
        self._undisturbed: dict[tuple[int, str], Path] = {}
        self._numbers = itertools.count()

    def play(self, plan: Plan) -> Outcome:
        """All attempts of a round, and what is to be said against them."""
        undisturbed = self._alone(plan.world, plan.model)
        folder = self._folder / f"round-{plan.seed}-{plan.number}"
        complaints: list[Complaint] = []
        attempts: list[AttemptSeen] = []
        for faults in (*plan.attempts, ()):
            seen = self._live(folder, plan, faults)
            complaints += check_attempt(seen, before=attempts[-1] if attempts else None)
            attempts.append(seen)
            if seen.hung:
                break
        else:
            complaints += check_last(attempts[-1], undisturbed)
        if not complaints:
            shutil.rmtree(folder)
        return Outcome(plan, tuple(complaints), tuple(attempts))

    def _alone(self, world: int, model: str) -> Path:
        """The folder of such a run to which nothing was done."""
        key = (world, model)
        if key not in self._undisturbed:
            folder = self._folder / f"alone-{world}-{model}"
            seen = self._live(folder, Plan(0, 0, world, model), ())
            assert set(seen.codes.values()) == {0}, seen.said
            self._undisturbed[key] = folder
        return self._undisturbed[key]

    def _live(self, folder: Path, plan: Plan, faults: tuple[Fault, ...]) -> AttemptSeen:
        options = {
            **plan.options,
            "world": plan.world,
            "model": plan.model,
            "directory": str(folder / "run"),
            "out": str(folder / "out"),
            "meet": str(self._folder / f"meet-{next(self._numbers)}"),
            "epochs": EPOCHS,
            "timeout_s": TIMEOUT_S,
            "faults": [asdict(fault) for fault in faults],
        }
        folder.mkdir(parents=True, exist_ok=True)
        playing = _Attempt(self._crew, plan.world, faults)
        self._crew.say(json.dumps(options))
        playing.see_through()
        return AttemptSeen.look(
            RunDir(folder / "run"),
            out=folder / "out",
            attempt=str(options["meet"]),
            pids=playing.pids,
            world=plan.world,
            keep=plan.options.get("keep", 2),
            codes=playing.codes,
            fired=tuple(faults[index] for index in playing.fired),
            hung=playing.hung,
            said=playing.said,
        )


@dataclass
class _Attempt:
    """One attempt as it goes on. ``due``: what is to be done later, as a heap."""

    crew: Child
    world: int
    faults: tuple[Fault, ...]
    pids: dict[int, int] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    fired: list[int] = field(default_factory=list)
    due: list[tuple[float, int, int | str, int]] = field(default_factory=list)
    hung: bool = False

    def __post_init__(self) -> None:
        self._begin = self._read = len(self.crew.lines)
        self._over = False
        self._numbers = itertools.count()

    @property
    def said(self) -> str:
        return "\n".join(self.crew.lines[self._begin : self._read])

    def see_through(self) -> None:
        """Until all ranks have ended."""
        begin_s = time.monotonic()
        told_s: float | None = None
        while not self._over:
            self._hear()
            self._do_what_is_due()
            now_s = time.monotonic()
            if self.codes and not self._over and now_s - (told_s or self._first_end_s) > LINGER_S:
                told_s = now_s
                self._signal("all", signal.SIGTERM)
            if now_s - begin_s > HANG_S:
                self._end_by_force()
            assert self.crew.process.poll() is None, f"the crew has ended:\n{self.said}"
            time.sleep(LOOK_S)

    def _hear(self) -> None:
        for line in self.crew.lines[self._read :]:
            self._read += 1
            if found := re.search(r"rank (\d+) pid (\d+)$", line):
                self.pids[int(found[1])] = int(found[2])
            elif found := re.search(r"rank (\d+) ended (-?\d+)$", line):
                if not self.codes:
                    self._first_end_s = time.monotonic()
                self.codes[int(found[1])] = int(found[2])
            elif found := re.search(r"^fault (\d+) (\d+)$", line):
                self._follow(int(found[1]), coordinator=int(found[2]))
            elif line == "all ended":
                self._over = True

    def _follow(self, index: int, *, coordinator: int) -> None:
        """A fault has begun: what follows now and later."""
        self.fired.append(index)
        fault = self.faults[index]
        if fault.what == "pause":
            self._later(fault.seconds, fault.rank, signal.SIGUSR2)
        elif fault.what == "freeze":
            self._later(fault.seconds, fault.rank, signal.SIGCONT)
        elif fault.what == "freeze_coordinator":
            self._later(fault.seconds, f"pid {coordinator}", signal.SIGCONT)
        elif fault.what == "stop_all":
            self._signal("all and the coordinator", signal.SIGTERM)
        elif fault.what.startswith("suspend"):
            whom = "all" if fault.what == "suspend" else "all and the coordinator"
            self._signal("all", signal.SIGTSTP)
            self._later(GRACE_S, whom, signal.SIGSTOP)
            self._later(GRACE_S + fault.seconds, whom, signal.SIGCONT)

    def _later(self, after_s: float, whom: int | str, signo: int) -> None:
        at_s = time.monotonic() + after_s
        heapq.heappush(self.due, (at_s, next(self._numbers), whom, signo))

    def _do_what_is_due(self) -> None:
        while self.due and self.due[0][0] <= time.monotonic():
            _, _, whom, signo = heapq.heappop(self.due)
            self._signal(whom, signo)

    def _signal(self, whom: int | str, signo: int) -> None:
        for pid in self._pids_of(whom):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signo)

    def _pids_of(self, whom: int | str) -> list[int]:
        """A rank alone; with its workers, "all" but the coordinator, or "all and the coordinator";
        or "pid P"."""
        there = {rank: pid for rank, pid in self.pids.items() if rank not in self.codes}
        if isinstance(whom, int):
            return [there[whom]] if whom in there else []
        if whom.startswith("pid "):
            return [pid for pid in [int(whom.removeprefix("pid "))] if pid]
        coordinator = coordinator_of(there[0]) if 0 in there and whom == "all" else None
        return [
            pid
            for rank in there.values()
            for pid in (rank, *descendants(rank))
            if pid != coordinator
        ]

    def _end_by_force(self) -> None:
        """It hangs: have all that are left say where, and end them."""
        self.hung = True
        for signo in (signal.SIGCONT, signal.SIGQUIT):
            self._signal("all and the coordinator", signo)
        time.sleep(1.0)
        self._signal("all", signal.SIGKILL)
        while not self._over and self.crew.process.poll() is None:
            self._hear()
            time.sleep(LOOK_S)

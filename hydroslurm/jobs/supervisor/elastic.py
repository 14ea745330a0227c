"""The supervisor of an elastic job, with its coordinator.

The coordinator serves the members; beside it members are submitted and replaced. Whatever ends
this process leaves the members as they are, unless the run has ended or was cancelled: the next
one goes on from the ledger.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from hydroslurm.core.exitcodes import CANCELLED, FAILED, RUN_AGAIN
from hydroslurm.core.files import read_end
from hydroslurm.core.rundir import RunDir
from hydroslurm.elastic import coordinator as elastic_coordinator
from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.errors import RunFolderError
from hydroslurm.jobs.plan import Plan
from hydroslurm.jobs.supervisor.allocator import Allocator
from hydroslurm.jobs.supervisor.conditions import (
    ConditionType,
    add_condition,
    final_condition,
    read_conditions,
)
from hydroslurm.jobs.supervisor.elements import Elements
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.slurm.client import open_client
from hydroslurm.slurm.policy import StopReason
from hydroslurm.slurm.stops import IN_GRACE, ask_why

LEAVE_S = 60.0
"""So long members of a run that has failed may take to save and go; a cancelled job's coordinator
is killed before."""


_MOST_WORDS = 300
"""Characters of a line that go into the ledger."""


class ElasticSupervisor:
    """One start of an elastic job's coordinator."""

    def __init__(
        self,
        run: RunDir,
        plan: Plan,
        *,
        allocation: Allocation,
        environ: Mapping[str, str],
        log: Callable[[str], None],
    ) -> None:
        """``allocation``: of the job whose batch script this is."""
        self._run = run
        self._allocation = allocation
        self._environ = environ
        self._log = log
        self._allocator = allocator_of(run, plan, environ=environ, log=log)
        self._signal: int | None = None
        self._coordinator: elastic_coordinator.Coordinator | None = None
        self._status = 0

    def supervise(self) -> int:
        """Serve until the run has ended, or this process has to go; return the exit status.

        Raises:
            StaleAttempt: a newer coordinator has taken over.
        """
        for number in (signal.SIGTERM, signal.SIGURG, signal.SIGINT):
            signal.signal(number, self._on_signal)
        if self._verdict() is None:
            self._serve()
        verdict = self._verdict()
        if self._status == RUN_AGAIN or verdict is None:
            return self._status or RUN_AGAIN
        self._allocator.cancel_all()
        return CANCELLED if verdict == "Cancelled" else FAILED if verdict else 0

    def _serve(self) -> None:
        served = elastic_coordinator.start(ElasticFolder(run=self._run.root))
        self._coordinator = served
        served.observers += [self._observe, self._allocator.observe]
        served.on_tick.append(self._on_tick)
        self._allocator.start()
        if not served.membership.finished:
            served.run()
        if served.membership.gave_up and self._status == 0:
            self._give_up(served, "CannotMeet", served.membership.gave_up)
        self._allocator.stop()
        if served.membership.finished and self._status == 0:
            self._allocator.wait_until_all_ended(stop=lambda: self._signal is not None)
            if self._signal is not None:
                self._status = RUN_AGAIN
                return
            self._end("Succeeded", "Finished", "the training is complete")

    def _observe(self, kind: str, data: Mapping[str, Any]) -> None:
        if self._status:
            return  # it has been said how this run ends
        try:
            if kind == "suspended":
                fewest = f"{len(data['members'])} members are left, and {data['min']} are needed"
                self._add("Suspended", "TooFewMembers", f"{fewest}; it goes on when they are there")
            elif kind == "generation":
                now = next(reversed(read_conditions(self._run.conditions_jsonl)), None)
                if now is None or now.type != "Running":
                    self._add(
                        "Running", "GenerationFormed", f"{len(data['members'])} members train"
                    )
        except RunFolderError as error:  # a full disk: the run goes on without this condition
            self._log(str(error))

    def _on_tick(self, _: float) -> None:
        served = self._coordinator
        assert served is not None
        size = served.membership.size
        if self._signal is not None and self._status == 0:
            self._leave(served)
        elif self._status == 0 and (verdict := self._allocator.elements.verdict()) is not None:
            self._give_up(served, *verdict)
        elif self._status == 0 and not (
            served.membership.finished
            or served.membership.gave_up
            or served.membership.is_in_tail  # its members end one by one
        ):
            self._send_away(served)
            self._allocator.want(size.wanted + size.spares, served.membership.current)

    def _send_away(self, served: elastic_coordinator.Coordinator) -> None:
        """Members whose jobs have ended leave: of a node whose slurmd has died, or of a killed
        slurmstepd, the ranks live on where Slurm has nothing of them any more."""
        membership = served.membership
        for name in self._allocator.elements.ended & membership.members.keys():
            reason = "its job has ended, Slurm says"
            served.act(membership.leave((name, 0), reason, served.clock.now_s()))

    def _leave(self, served: elastic_coordinator.Coordinator) -> None:
        """Slurm ends this process: for another one, or because nobody wants the run any more."""
        stop = ask_why(
            open_client(environ=self._environ, retry_policy=IN_GRACE),
            self._allocation.job_id,
        )
        self._log(f"{signal.Signals(self._signal or signal.SIGTERM).name}: {stop.message}")
        if stop.reason is StopReason.CANCELLED:
            self._give_up(served, "Cancelled", stop.message)
        else:
            self._status = RUN_AGAIN
            served.end_within(0.0)

    def _give_up(self, served: elastic_coordinator.Coordinator, reason: str, message: str) -> None:
        """The members are told to go, and may save before."""
        self._status = CANCELLED if reason == "Cancelled" else FAILED
        self._end("Failed", reason, message)
        self._allocator.stop()
        self._allocator.cancel_all()
        served.end_within(LEAVE_S)

    def _end(self, kind: ConditionType, reason: str, message: str) -> None:
        if final_condition(read_conditions(self._run.conditions_jsonl)) is None:
            self._add(kind, reason, message)
        self._log(f"{kind}: {message}")

    def _add(self, kind: ConditionType, reason: str, message: str) -> None:
        path, count = self._run.conditions_jsonl, self._allocation.restart_count
        add_condition(path, kind, reason=reason, message=message, restart_count=count)

    def _verdict(self) -> str | None:
        """None while there is none, "" after success, else the reason of the failure."""
        found = final_condition(read_conditions(self._run.conditions_jsonl))
        if found is None:
            return None
        return found.reason if found.is_failure else ""

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signal = number


def allocator_of(
    run: RunDir, plan: Plan, *, environ: Mapping[str, str], log: Callable[[str], None]
) -> Allocator:
    """The allocator of an elastic job."""
    assert plan.elastic is not None
    return Allocator(
        ElasticFolder(run=run.root),
        Elements(plan.elastic, plan.limits, last_words=lambda name: last_words(run.logs, name)),
        client=open_client(environ=environ),
        environ=environ,
        log=log,
    )


def last_words(logs: Path, member: str) -> str:
    """The last line that a member's tasks have written, or else its batch script."""
    for path in [*sorted(logs.glob(f"member-{member}-*.log")), logs / f"member-{member}.log"]:
        with contextlib.suppress(OSError):
            lines = read_end(path, most_bytes=1 << 16).decode(errors="replace").splitlines()
            for line in filter(None, map(str.strip, reversed(lines))):
                if ": leaves with status " not in line:  # an agent's last word says no why
                    return line[:_MOST_WORDS]
    return ""

"""The supervisor of an elastic job, with its coordinator.

The coordinator serves the members; beside it members are submitted and replaced. Whatever ends
this process leaves the members as they are, unless the run has ended or was cancelled: the next
one goes on from the ledger.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from hydroslurm.core.exitcodes import CANCELLED, FAILED, RUN_AGAIN
from hydroslurm.core.files import read_end
from hydroslurm.core.jobid import JobId
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.threads import thread
from hydroslurm.core.trust import user_name
from hydroslurm.elastic import coordinator as elastic_coordinator
from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.elastic.roster import Record
from hydroslurm.errors import LaunchError, RunFolderError
from hydroslurm.jobs.plan import Plan
from hydroslurm.jobs.supervisor.conditions import (
    ConditionType,
    add_condition,
    final_condition,
    read_conditions,
)
from hydroslurm.jobs.supervisor.elements import Action, Cancel, Elements, Submit
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.slurm.client import SlurmClient, open_client
from hydroslurm.slurm.policy import StopReason
from hydroslurm.slurm.programs import sbatch, submitted
from hydroslurm.slurm.stops import IN_GRACE, ask_why
from hydroslurm.slurm.values import Element, JobState

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


# --- its elements in Slurm

POLL_S = 10.0
"""Between two lists from Slurm: sites dislike more."""
QUIET_POLL_S = 60.0
"""The same while nothing is under way."""
AGAIN_S = 30.0
"""After a refused submission."""
MOST_ELEMENTS = 1000
"""Of one array: MaxArraySize is 1001 by default."""
_KEPT = ("SLURM_CONF",)
"""All other variables of Slurm are about the coordinator's own job."""


class Allocator:
    """Submits and cancels elements in a thread of its own; :meth:`observe` and :meth:`want` return
    at once.

    Slurm may need seconds for an answer, and the coordinator hears from its members several times a
    second. Slurm is asked for a list at most every ten seconds, while something is under way; word
    of members that go comes from the coordinator at once.
    """

    def __init__(
        self,
        folder: ElasticFolder,
        elements: Elements,
        *,
        client: SlurmClient,
        environ: Mapping[str, str],
        log: Callable[[str], None],
    ) -> None:
        self.elements = elements
        self._folder = folder
        self._client = client
        self._environ = {
            key: text
            for key, text in environ.items()
            if key in _KEPT or not key.startswith(("SLURM_", "SLURMD_"))
        }
        self._log = log
        self._news: queue.SimpleQueue[Callable[[float], None] | None] = queue.SimpleQueue()
        self._count: int | None = None
        self._training: tuple[str, ...] = ()
        self._polled_s = -POLL_S
        self._submit_s = 0.0
        self._said = ""
        self._thread = thread(self._run, name="hydroslurm-allocator")
        for entry in folder.ledger():
            self.elements.replay(entry["kind"], entry, time.monotonic())

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Do nothing more; return when that is so."""
        self._news.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def observe(self, kind: str, data: Mapping[str, Any]) -> None:
        """A line that the coordinator has written into the ledger."""
        self._news.put(lambda now_s: self._act(self.elements.note(kind, data, now_s)))

    def want(self, count: int, training: tuple[str, ...]) -> None:
        """So many members are to be there, of which these train."""
        self._news.put(lambda _: self._wanted(count, training))

    def cancel_all(self) -> None:
        """Cancel whatever Slurm has of this run; called when the thread has stopped."""
        listed = self._listed()
        left = [one.name for one in listed if not one.state.has_ended]
        self._client.cancel_elements(left)
        if left:
            self._log(f"cancelled {', '.join(left)}")

    def _listed(self) -> tuple[Element, ...]:
        """What Slurm has of this run: no other job has the name of its run folder."""
        return self._client.elements(user=user_name(), name=self._folder.run.name)

    def wait_until_all_ended(self, *, stop: Callable[[], bool]) -> None:
        """After the end of the training: elements that have not begun are cancelled, the others
        end by themselves."""
        self._client.cancel_elements(self.elements.unstarted())
        poll_s = 2.0  # most have ended by then
        while not stop():
            time.sleep(poll_s)
            poll_s = POLL_S
            listed = self._listed()
            if all(one.state.has_ended for one in listed):
                return
            # its member has left long ago; it would stay there until somebody resumes it
            suspended = [one.name for one in listed if one.state is JobState.SUSPENDED]
            self._client.cancel_elements(suspended)

    # --- the thread

    def _run(self) -> None:
        while True:
            try:
                news = self._news.get(timeout=1.0)
            except queue.Empty:
                news = self._nothing
            if news is None:
                return
            try:
                now_s = time.monotonic()
                news(now_s)
                if self._news.empty():
                    self._look(now_s)
                    self._adjust(now_s)
                self._say("")
            except Exception as error:  # a full disk, too; without this thread no member comes
                with contextlib.suppress(OSError):
                    self._say(str(error) or repr(error))

    def _nothing(self, _: float) -> None:
        """Time has passed."""

    def _wanted(self, count: int, training: tuple[str, ...]) -> None:
        self._count, self._training = count, training

    def _look(self, now_s: float) -> None:
        every_s = POLL_S if self.elements.is_unsettled else QUIET_POLL_S
        if now_s - self._polled_s < every_s:
            return
        self._polled_s = now_s
        listed = self._listed()
        self._act(self.elements.seen(listed, now_s))

    def _adjust(self, now_s: float) -> None:
        if self._count is None or self.elements.verdict() is not None or now_s < self._submit_s:
            return
        self._act(self.elements.wanted(self._count, training=self._training, now_s=now_s))

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Record):
                self._record(action.kind, action.data)
                self._log(f"{action.kind}: {action.data}")
            elif isinstance(action, Cancel):
                self._client.cancel_elements(action.names)
                self._log(f"cancelled {', '.join(action.names)}")
            else:
                self._submit(action)

    def _submit(self, wanted: Submit) -> None:
        """Raises LaunchError: sbatch refused it; it is tried again later."""
        count = min(wanted.count, MOST_ELEMENTS)
        script = self._folder.root / ("base.sbatch" if wanted.is_base else "members.sbatch")
        array = f"--array=0-{count - 1}"
        bad = ",".join(sorted(self.elements.excluded))
        self._submit_s = time.monotonic() + AGAIN_S
        done = sbatch(script, array, f"--exclude={bad}", environ=self._environ)
        if "node configuration is not available" in done.stderr and bad:
            self._log(f"there are not enough nodes without {bad}, so that they are taken")
            done = sbatch(script, array, environ=self._environ)
        job_id = submitted(done.stdout)
        if job_id is None:
            raise LaunchError(
                f"members cannot be submitted: {(done.stderr or done.stdout).strip()}"
            )
        self._submit_s = 0.0
        members = [str(JobId(job_id, number)) for number in range(count)]
        data = {"members": members, "job_id": job_id, "base": wanted.is_base}
        self._record("submitted", data)
        self.elements.note("submitted", data, time.monotonic())
        self._log(f"submitted {', '.join(members)}")

    def _say(self, problem: str) -> None:
        """What keeps members from coming is in the ledger once, for `describe`."""
        if problem != self._said:
            self._said = problem
            if problem:
                self._record("refused", {"reason": problem})
                self._log(problem)

    def _record(self, kind: str, data: Mapping[str, Any]) -> None:
        """What Slurm has done is done, on a full disk too."""
        try:
            self._folder.record(kind, data)
        except OSError as error:
            self._log(f"{error}: it is not in the ledger that {kind}: {data}")

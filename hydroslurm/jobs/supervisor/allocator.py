"""Keeps an elastic run's elements in Slurm, in a thread of its own beside the coordinator.

Slurm may need seconds for an answer, and the coordinator hears from its members several times a
second. It asks Slurm for a list at most every ten seconds, while something is under way; word of
members that go comes from the coordinator at once.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Mapping
from typing import Any

from hydroslurm.core.jobid import JobId
from hydroslurm.core.threads import thread
from hydroslurm.core.trust import user_name
from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.elastic.roster import Record
from hydroslurm.errors import LaunchError
from hydroslurm.jobs.supervisor.elements import Action, Cancel, Elements, Submit
from hydroslurm.slurm.client import SlurmClient
from hydroslurm.slurm.programs import sbatch, submitted
from hydroslurm.slurm.values import Element, JobState

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
    """Submits and cancels elements; :meth:`observe` and :meth:`want` return at once."""

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

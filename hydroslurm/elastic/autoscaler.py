"""The autoscaler of a running elastic run: observes it and carries out the decisions."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
from typing import TYPE_CHECKING

from hydroslurm.core.threads import thread
from hydroslurm.core.trust import user_name
from hydroslurm.elastic.autoscale import UTILIZATIONS, AutoscalePolicy, Observation, decide
from hydroslurm.errors import HydroslurmError

if TYPE_CHECKING:
    from hydroslurm.elastic.coordinator import Coordinator
    from hydroslurm.elastic.folder import ElasticFolder


class Autoscaler:
    """Observes the run every ``observe_s`` of its timing, from the coordinator's thread.

    A separate thread asks Slurm, since a slurmctld that hangs must not block the coordinator.
    The answer counts in the next observation.
    """

    def __init__(
        self, folder: ElasticFolder, policy: AutoscalePolicy, coordinator: Coordinator
    ) -> None:
        self._folder = folder
        self._policy = policy
        self._coordinator = coordinator
        self._history: list[Observation] = []
        self._absences = 0
        self._due_s = 0.0
        self._pending_jobs: int | None = None
        self._asking: threading.Thread | None = None
        self._recorded = ""

    def tick(self, now_s: float) -> None:
        """Observe and decide if it is time; ``now_s``: monotonic."""
        if now_s < self._due_s:
            return
        if self._absences != self._coordinator.clock.absences:
            self._absences = self._coordinator.clock.absences
            self._history.clear()  # the observations may be hours old
        self._due_s = now_s + self._coordinator.membership.timing.observe_s
        self._history.append(self.observe(now_s))
        self._ask_slurm()
        begin_s = now_s - self._policy.history_s
        # keep an older one: it shows that the longest window was observed in full
        while len(self._history) > 1 and self._history[1].moment_s <= begin_s:
            del self._history[0]
        if self._coordinator.membership.state == "Running":
            self._decide(now_s)

    def observe(self, now_s: float) -> Observation:
        """Observe the run and its partition. Step times count only while it trains."""
        status, pending_jobs = self._coordinator.status(), self._pending_jobs
        self._pending_jobs = None  # use an answer once: an old one misleads
        samples = [beat["use"] for beat in self._coordinator.beats.values()]
        use = {
            name: statistics.fmean(sample[name] for sample in samples if name in sample)
            for name in UTILIZATIONS
            if any(name in sample for sample in samples)
        }
        return Observation(
            moment_s=now_s,
            size=status["size"],
            wanted=status["wanted"],
            step_s=(status["step_s"] or None) if status["state"] == "Running" else None,
            pending_jobs=pending_jobs,
            **use,
        )

    def _decide(self, now_s: float) -> None:
        membership = self._coordinator.membership
        decision = decide(self._policy, membership.size, self._history)
        if decision.size == membership.size.wanted:
            return
        if not self._policy.dry_run:
            by = f"autoscaler: {decision.reason}"
            self._coordinator.act(membership.scale(decision.size, (), now_s, by=by))
        elif self._recorded != (decision_text := f"{decision.size}: {decision.reason}"):
            with contextlib.suppress(OSError):  # disk full: the next observation records it
                self._folder.record("dry_run", {"size": decision.size, "reason": decision.reason})
                self._recorded = decision_text  # once, not at every observation

    def _ask_slurm(self) -> None:
        partition = self._policy.partition or os.environ.get("SLURM_JOB_PARTITION", "")
        if self._policy.queue_length is None or not partition:
            return
        if self._asking is None or not self._asking.is_alive():
            self._asking = thread(self._ask, partition, name="hydroslurm-queue")
            self._asking.start()

    def _ask(self, partition: str) -> None:
        from hydroslurm.slurm.client import open_client

        with contextlib.suppress(HydroslurmError):  # unknown: the queue then lowers nothing
            client = open_client()
            self._pending_jobs = client.pending_jobs(partition, without_user=user_name())

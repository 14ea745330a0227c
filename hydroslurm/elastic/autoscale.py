"""Autoscaling of elastic runs: what is observed, the decision that follows from it by a job's rules
(:func:`decide`, pure), and who carries it out.

The terms come from Kubernetes' HorizontalPodAutoscaler and KEDA. A *metric* with a target
requests a size (size times value over target; the largest request wins), which the queue may lower.
A *stabilization window* takes its most cautious recommendation. *Cooldowns* and steps bound how
often and how far the size moves. ``min`` and ``max`` always hold.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydroslurm.core.memory import room
from hydroslurm.core.threads import thread
from hydroslurm.core.trust import user_name
from hydroslurm.elastic.roster import Size
from hydroslurm.errors import HydroslurmError

if TYPE_CHECKING:
    from hydroslurm.elastic.coordinator import Coordinator
    from hydroslurm.elastic.folder import ElasticFolder

UTILIZATIONS = ("cpu", "memory", "gpu")


@dataclass(frozen=True, kw_only=True)
class Behavior:
    """How far and how often the size moves in one direction.

    Attributes:
        stabilization_window_s: the most cautious recommendation of this window counts.
        cooldown_s: after a change of size, keep it this long.
        step: most members added or removed at once.
    """

    stabilization_window_s: int
    cooldown_s: int = 180
    step: int = 4


SCALE_UP = Behavior(stabilization_window_s=60)
SCALE_DOWN = Behavior(stabilization_window_s=300)


@dataclass(frozen=True, kw_only=True)
class AutoscalePolicy:
    """The validated rules of a job spec; a rule that is None is off.

    Attributes:
        dry_run: record decisions, but keep the size.
        partition: whose queue counts; "": that of the coordinator's job.
        step_time_s: target time of a step.
        cpu, memory, gpu: target utilizations, 0 to 1.
        queue_length: with more of other users' jobs waiting in the partition, the run gives
            nodes back.
        tolerance: relative deviation from a target that counts as met.
    """

    dry_run: bool = False
    partition: str = ""
    step_time_s: float | None = None
    cpu: float | None = None
    memory: float | None = None
    gpu: float | None = None
    queue_length: int | None = None
    tolerance: float = 0.1
    scale_up: Behavior = SCALE_UP
    scale_down: Behavior = SCALE_DOWN

    @property
    def history_s(self) -> float:
        """How long observations are kept."""
        directions = (self.scale_up, self.scale_down)
        return max(max(way.stabilization_window_s, way.cooldown_s) for way in directions)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """State of the run and its partition at one moment; None: unknown.

    Attributes:
        size: members training.
        wanted: members wanted.
        step_s: of the whole run.
        cpu, memory, gpu: mean utilization of the members' nodes, 0 to 1.
        pending_jobs: other users' jobs in the partition.
    """

    moment_s: float
    size: int
    wanted: int
    step_s: float | None = None
    cpu: float | None = None
    memory: float | None = None
    gpu: float | None = None
    pending_jobs: int | None = None


@dataclass(frozen=True)
class Decision:
    """The size to want now, and why: for ``describe`` and the ledger."""

    size: int
    reason: str


def decide(policy: AutoscalePolicy, size: Size, history: Sequence[Observation]) -> Decision:
    """Decide the wanted size at the newest observation, the last one; ``history`` begins when the
    coordinator did, or ``policy.history_s`` ago."""
    now_s, wanted = history[-1].moment_s, history[-1].wanted
    newest = _recommend(policy, size, history[-1])
    if newest.size == wanted:
        return newest
    up = newest.size > wanted
    behavior = policy.scale_up if up else policy.scale_down
    window_s = behavior.stabilization_window_s
    if history[0].moment_s > now_s - window_s:
        why = f"observed for less than {window_s:g} s before scaling {'up' if up else 'down'}"
        return Decision(wanted, f"{newest.reason}; {why}")
    cautious = min if up else max
    within = [
        _recommend(policy, size, seen) for seen in history if seen.moment_s >= now_s - window_s
    ]
    towards = cautious([newest, *within], key=lambda seen: seen.size)
    if (towards.size > wanted) != up or towards.size == wanted:
        why = f"stabilizing: {towards.size} was recommended within {window_s:g} s"
        return Decision(wanted, f"{newest.reason}; {why}")
    changed_s = _changed_s(history)
    if changed_s is not None and now_s - changed_s < behavior.cooldown_s:
        left_s = behavior.cooldown_s - (now_s - changed_s)
        return Decision(wanted, f"{newest.reason}; cooling down for another {left_s:.0f} s")
    by = min(behavior.step, abs(towards.size - wanted))
    return Decision(wanted + by if up else wanted - by, towards.reason)


def _recommend(policy: AutoscalePolicy, bounds: Size, seen: Observation) -> Decision:
    """Recommend a size for one observation: the metrics' largest request, lowered by the queue."""
    size, reason = _requested(policy, bounds.max, seen)
    if policy.queue_length is not None and (seen.pending_jobs or 0) > policy.queue_length:
        over = (seen.pending_jobs or 0) - policy.queue_length
        if seen.wanted - over < size:
            size = seen.wanted - over
            reason = f"{seen.pending_jobs} jobs wait, {policy.queue_length} may"
    allowed = min(max(size, bounds.min), bounds.max)
    if size != allowed:
        reason = f"{reason}, within elastic.min and max: {allowed}"
    return Decision(allowed, reason)


def _requested(policy: AutoscalePolicy, most: int, seen: Observation) -> tuple[int, str]:
    """Return the largest request of the metrics. An unknown metric keeps the size from going
    down, as in the HorizontalPodAutoscaler."""
    requests: list[tuple[int, str]] = []
    targets = {"step_s": policy.step_time_s}
    targets.update({name: getattr(policy, name) for name in UTILIZATIONS})
    for name, target in targets.items():
        if target is None:
            continue
        value = getattr(seen, name)
        if value is None or not math.isfinite(value) or value <= 0 or not seen.size:
            requests.append((seen.wanted, f"{name} is not known"))
        elif abs(value / target - 1) <= policy.tolerance:
            requests.append((seen.wanted, f"{name} {value:.3g} meets its target {target:g}"))
        else:
            asked = math.ceil(seen.size * value / target - 1e-9)
            requests.append((asked, f"{name} {value:.3g}, target {target:g}: {asked} members"))
    if not requests:
        return most, "as many as may be"
    return max(requests)


def _changed_s(history: Sequence[Observation]) -> float | None:
    for before, after in zip(reversed(history[:-1]), reversed(history), strict=False):
        if before.wanted != after.wanted:
            return after.moment_s
    return None


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
        known = {name: [use[name] for use in samples if name in use] for name in UTILIZATIONS}
        means = {name: sum(values) / len(values) for name, values in known.items() if values}
        return Observation(
            moment_s=now_s,
            size=status["size"],
            wanted=status["wanted"],
            step_s=(status["step_s"] or None) if status["state"] == "Running" else None,
            pending_jobs=pending_jobs,
            **means,
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


# --- what each rank reports of its node

GPU_EVERY_S = 5.0
"""An NVML query takes milliseconds, and a beat is sent every second."""


class Usage:
    """Utilization since the last reading. Figures that cannot be read are left out."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._ticks: tuple[int, int] | None = None
        self._gpu_due_s = 0.0
        self._gpu: float | None = None

    def read(self) -> dict[str, float]:
        """Return ``cpu``: of the CPUs this process may run on. ``memory``: of the tightest limit of
        its cgroups or the node, without page cache. ``gpu``: of torch's current device."""
        readings = {"cpu": self._cpu(), "memory": self._memory(), "gpu": self._device()}
        return {name: round(value, 4) for name, value in readings.items() if value is not None}

    def _cpu(self) -> float | None:
        allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        busy = total = 0
        try:
            lines = (self._root / "proc/stat").read_text().splitlines()
            for name, *counts in (line.split() for line in lines if line.startswith("cpu")):
                if name in allowed:
                    ticks = [int(count) for count in counts[:8]]  # user time already includes guest
                    total += sum(ticks)
                    busy += sum(ticks) - ticks[3] - ticks[4]  # idle, iowait
        except (OSError, ValueError, IndexError):
            return None
        before, self._ticks = self._ticks, (busy, total)
        if before is None or total <= before[1]:
            return None
        return min(1.0, max(0.0, (busy - before[0]) / (total - before[1])))

    def _memory(self) -> float | None:
        tightest = room(root=self._root)
        return tightest.used_bytes / tightest.limit_bytes or None  # 0 means it was unreadable

    def _device(self) -> float | None:
        torch = sys.modules.get("torch")  # do not import it for this
        if torch is None or time.monotonic() < self._gpu_due_s:
            return self._gpu
        self._gpu_due_s = time.monotonic() + GPU_EVERY_S
        try:
            ours = torch.cuda.is_initialized()  # querying an unused device would initialize it
            self._gpu = torch.cuda.utilization() / 100 if ours else None
        except Exception:  # no NVML, no permission, a lost device: the error types vary
            self._gpu, self._gpu_due_s = None, float("inf")
        return self._gpu

"""The autoscaler of a running elastic run: observes, records, and carries out what is decided."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from hydroslurm.core.files import parse_json, read_regular
from hydroslurm.elastic.autoscale import Observation, decide
from hydroslurm.elastic.autoscale_rules import AutoscalePolicy
from hydroslurm.errors import HydroslurmError

if TYPE_CHECKING:
    from hydroslurm.elastic.coordinator import Coordinator
    from hydroslurm.elastic.folder import ElasticFolder
    from hydroslurm.slurm.values import PartitionLoad

_MOST_BYTES = 64 << 20
_NAMES = frozenset(one.name for one in fields(Observation))


class Autoscaler:
    """Looks at the run every ``observe_s`` of its timing, from the coordinator's thread.

    Slurm is asked in a thread of its own: a slurmctld that hangs must not hold the coordinator up.
    Its answer counts in the observation after the question.
    """

    def __init__(
        self, folder: ElasticFolder, policy: AutoscalePolicy, coordinator: Coordinator
    ) -> None:
        self._folder = folder
        self._policy = policy
        self._coordinator = coordinator
        self._history = deque(read_observations(folder, since_s=time.time() - policy.history_s))
        self._due_s = 0.0
        self._load: PartitionLoad | None = None
        self._asking: threading.Thread | None = None
        self._said = ""

    def tick(self, now_s: float) -> None:
        """``now_s``: monotonic."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + self._coordinator.membership.timing.observe_s
        moment_s = time.time()
        seen = self.observe(moment_s)
        self._ask_slurm()
        record_observation(self._folder, seen)
        self._history.append(seen)
        while self._history[0].epoch_s < moment_s - self._policy.history_s:
            self._history.popleft()
        if self._coordinator.membership.state == "Running":
            self._decide(moment_s, now_s)

    def observe(self, epoch_s: float) -> Observation:
        """How the run and its partition stand. Paces count only while it trains."""
        status, load = self._coordinator.status(), self._load
        self._load = None  # an answer is used once: one that is old misleads
        running = status["state"] == "Running"
        uses = list(self._coordinator.uses.values())
        use = {
            name: statistics.fmean(one[name] for one in uses if name in one)
            for name in ("cpu", "memory", "gpu")
            if any(name in one for one in uses)
        }
        return Observation(
            epoch_s=epoch_s,
            size=status["size"],
            wanted=status["wanted"],
            step_s=(status["step_s"] or None) if running else None,
            samples_per_s=(status["samples_per_s"] or None) if running else None,
            pending_jobs=load.pending_jobs if load else None,
            idle_nodes=load.idle_nodes if load else None,
            **use,
        )

    def _decide(self, moment_s: float, now_s: float) -> None:
        decision = decide(self._policy, self._history, moment_s)
        membership = self._coordinator.membership
        if decision.size == membership.size.wanted:
            return
        if not self._policy.dry_run:
            by = f"autoscaler: {decision.reason}"
            self._coordinator.act(membership.scale(decision.size, (), now_s, by=by))
        elif self._said != (said := f"{decision.size}: {decision.reason}"):
            self._said = said  # once, not at every observation
            self._folder.record("dry_run", {"size": decision.size, "reason": decision.reason})

    def _ask_slurm(self) -> None:
        rules = self._policy
        partition = rules.partition or os.environ.get("SLURM_JOB_PARTITION", "")
        if (rules.leave_idle is None and rules.queue_length is None) or not partition:
            return
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=self._ask, args=(partition,), daemon=True)
            self._asking.start()

    def _ask(self, partition: str) -> None:
        from hydroslurm.slurm.client import open_client

        with contextlib.suppress(HydroslurmError):  # not known: the limits then let nothing grow
            self._load = open_client().load(partition, without_user=getpass.getuser())


def record_observation(folder: ElasticFolder, seen: Observation) -> None:
    """Append one line to ``observations.jsonl``."""
    line = json.dumps({name: value for name, value in asdict(seen).items() if value is not None})
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    descriptor = os.open(folder.observations_jsonl, flags, 0o600)
    with os.fdopen(descriptor, "a") as file:
        file.write(line + "\n")


def read_observations(folder: ElasticFolder, *, since_s: float = 0.0) -> list[Observation]:
    """What was recorded since a moment; lines that are torn or none of ours are passed over."""
    try:
        text = read_regular(folder.observations_jsonl, limit_bytes=_MOST_BYTES)
    except FileNotFoundError:
        return []
    return [one for one in _parsed(text.splitlines()) if one.epoch_s >= since_s]


def _parsed(lines: Iterable[bytes]) -> Iterable[Observation]:
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):
            entry = parse_json(line)
            known = isinstance(entry, dict) and entry.keys() <= _NAMES
            if known and all(type(value) in (int, float) for value in entry.values()):
                yield Observation(**entry)

"""The elements of job arrays that an elastic run has in Slurm, and those that it should have. Pure.

Each member is one element. It is never requeued: Slurm would let it wait (121 s by default), and it
could come back beside its replacement. One that is taken away is replaced by a fresh element at
once. What is known comes from the run's ledger and from a list of Slurm's, in any order and any
number of times; what is to be done follows from what is known, so that nothing depends on an event
that somebody has missed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hydroslurm.elastic.roster import CONNECTION_ENDED, Record
from hydroslurm.jobs.plan import ElasticPlan, RunLimits
from hydroslurm.jobs.supervisor.bad_nodes import blamed, cause_in
from hydroslurm.jobs.supervisor.exit_policy import Action as ExitAction
from hydroslurm.jobs.supervisor.exit_policy import ExitDecision
from hydroslurm.slurm import values
from hydroslurm.slurm.values import JobState

HANGS_S = 3.0
"""An element whose member is lost, and that still runs so much later, is cancelled."""
LINGERS_S = 30.0
"""One that has ended for the run, and that still runs so much later, is cancelled (again)."""
UNSEEN_S = 30.0
"""A new element may be missing from Slurm's list for so long."""

How = Literal["failure", "preemption", "left"]
_TAKEN = frozenset(
    {
        JobState.PREEMPTED,
        JobState.CANCELLED,
        JobState.NODE_FAIL,
        JobState.TIMEOUT,
        JobState.DEADLINE,
        JobState.REVOKED,
    }
)
"""Ends that say nothing against the training: counted as preemptions."""


@dataclass(frozen=True)
class Submit:
    """Submit so many elements, of the base array or of another one."""

    count: int
    is_base: bool


@dataclass(frozen=True)
class Cancel:
    """Cancel elements."""

    names: tuple[str, ...]


Action = Submit | Cancel | Record


@dataclass
class Element:
    """One element.

    Attributes:
        state: ``waiting``, ``running``; ``leaving``: it has said that it goes; ``lost``: its
            member is gone without a word; ``left``: the others go on without it; ``done``: a
            process of it has ended well behind the training.
        reason: why it goes.
    """

    name: str
    is_base: bool
    since_s: float
    state: Literal["waiting", "running", "leaving", "lost", "left", "done"] = "waiting"
    node: str = ""
    reason: str = ""
    has_joined: bool = False

    @property
    def counts(self) -> bool:
        """Whether it is one of those that are wanted. A lost one is until it is known why."""
        return self.state in ("waiting", "running", "lost")


class Elements:
    """All elements of one run.

    Attributes:
        elements: those that have not ended, by name, the oldest first.
        failures, preemptions: so far.
        excluded: node -> why nothing more is submitted to it.
    """

    def __init__(
        self,
        plan: ElasticPlan,
        limits: RunLimits,
        *,
        last_words: Callable[[str], str] = lambda _: "",
    ) -> None:
        """
        Args:
            limits: how many members may fail, and how many be preempted; one more ends the run.
            last_words: what the processes of an element wrote last.
        """
        self.elements: dict[str, Element] = {}
        self.failures = 0
        self.preemptions = 0
        self.excluded: dict[str, str] = {}
        self._plan, self._limits = plan, limits
        self._last_words = last_words
        self._ends: list[ExitDecision | None] = []
        self._ended: dict[str, float] = {}
        self._last_failure = ""
        self._finished = False
        self._is_complete = False  # trained, and nobody has failed in what follows

    # --- what is known
    # --------------------------------------------------------------------------------------------

    def replay(self, kind: str, data: Mapping[str, Any], now_s: float) -> None:
        """A line of the ledger from before this coordinator: what was concluded from it then is in
        lines of its own."""
        one = self.elements.get(str(data.get("member", "")))
        if one is None or kind == "ended" or one.state != "leaving":
            self.note(kind, data, now_s)

    def note(self, kind: str, data: Mapping[str, Any], now_s: float) -> list[Action]:
        """A line of the ledger, just written by the coordinator or for a :class:`Record`."""
        if kind == "submitted":
            for name in data["members"]:
                self.elements[name] = Element(name, bool(data.get("base")), now_s)
        elif kind == "ended":
            self._count(data, now_s)
        elif kind == "excluded":
            self.excluded[str(data["node"])] = str(data["reason"])
        elif kind == "wanted" and not str(data.get("by")).startswith("autoscaler"):
            self.excluded.clear()  # a person takes the nodes back
            self._ends.clear()
        elif kind == "trained":
            self._is_complete = True
        elif kind == "finished":
            self._finished = True
        elif kind == "forming":
            for name, _ in data["members"]:
                if (one := self.elements.get(name)) is not None:
                    one.has_joined, one.state = True, "running"
        elif (one := self.elements.get(str(data.get("member", "")))) is not None:
            return self._note_member(one, kind, data, now_s)
        return []

    def _note_member(
        self, one: Element, kind: str, data: Mapping[str, Any], now_s: float
    ) -> list[Action]:
        one.node = str(data.get("node") or one.node)
        if kind in ("failure", "left"):
            self._is_complete = False
        reason = str(data.get("reason", ""))
        if kind == "leaving":
            one.state, one.reason = "leaving", reason
        elif kind == "done":
            one.state = "done"
        elif kind == "left" and one.state == "leaving":
            return self._end(one, "preemption", one.reason, now_s)
        elif kind == "left":
            one.state, one.reason, one.since_s = "left", reason, now_s
        elif kind == "failure":
            if one.state == "leaving":  # it had said so, and was killed before it could go
                return self._end(one, "preemption", one.reason, now_s)
            one.state, one.reason, one.since_s = "lost", reason, now_s
        return []

    def seen(self, listed: Iterable[values.Element], now_s: float) -> list[Action]:
        """All that Slurm knows of this run's elements."""
        rows = {row.name: row for row in listed}
        actions: list[Action] = []
        self._ended = {name: at_s for name, at_s in self._ended.items() if name in rows}
        for row in rows.values():
            if row.name in self.elements or row.state.has_ended or self._finished:
                continue
            ended_s = self._ended.get(row.name)
            if ended_s is None:
                # submitted by a coordinator that was killed before it could write that down
                self.elements[row.name] = Element(row.name, False, now_s)
            elif now_s - ended_s > LINGERS_S:
                actions.append(Cancel((row.name,)))
        over = {name for name, row in rows.items() if row.state.has_ended}
        # those that run first: whether others do says whose fault an end is
        for one in sorted(self.elements.values(), key=lambda one: one.name in over):
            found = rows.get(one.name)
            if found is None:
                if now_s - one.since_s > UNSEEN_S:
                    actions += self._end(one, "left", "Slurm does not know it any more", now_s)
            elif found.state.has_ended:
                one.node = found.node or one.node
                actions += self._end(one, *self._why(one, found), now_s)
            elif one.state == "waiting" and not found.state.is_waiting:
                one.state, one.node = "running", found.node
            elif one.state == "lost" and found.state is JobState.SUSPENDED:
                actions += self._end(one, "preemption", "Slurm suspended it", now_s)
            elif one.state == "lost" and now_s - one.since_s > HANGS_S:
                actions += self._end(one, "failure", one.reason, now_s)
                actions.append(Cancel((one.name,)))
            elif one.state == "left" and now_s - one.since_s > LINGERS_S:
                actions += self._end(one, "left", one.reason, now_s)
                actions.append(Cancel((one.name,)))
        return actions

    def _why(self, one: Element, found: values.Element) -> tuple[How, str]:
        state = found.state
        if one.state in ("left", "done") or self._finished:
            return "left", one.reason or "the run has finished"
        if one.state == "leaving":
            return "preemption", one.reason
        if state in _TAKEN:
            return "preemption", f"Slurm ended it: {state.value}"
        if state is JobState.COMPLETED and not one.has_joined:
            return "failure", (
                "its script ended without having joined the run: it needs a hydroslurm.Run, which "
                "this job makes elastic; `elastic: {engine: restart}` takes any script"
            )
        why = one.reason
        if why in ("", CONNECTION_ENDED) and (words := self._last_words(one.name)):
            # it has told the coordinator nothing: it could not join, or its script has failed
            why = f"the last line of its log: {words}"
        return "failure", f"it ended {state.value}{f' ({why})' if why else ''}"

    def _end(self, one: Element, how: How, reason: str, now_s: float) -> list[Action]:
        others = {other.node for other in self.elements.values() if other.state == "running"}
        data = {"member": one.name, "node": one.node, "how": how, "reason": reason,
                "alone": others <= {one.node}}  # fmt: skip
        self._count(data, now_s)
        actions: list[Action] = [Record("ended", data)]
        bad = blamed(self._ends, in_a_row=self._plan.exclude_after) if how == "failure" else {}
        for node in [node for node in bad if self._may_exclude(node)]:
            self.excluded[node] = why = bad[node]
            actions.append(Record("excluded", {"node": node, "reason": why}))
            waiting = [one for one in self.elements.values() if one.state == "waiting"]
            actions += self._take_back(waiting, f"it could have started on {one.node}", now_s)
        return actions

    def _may_exclude(self, node: str) -> bool:
        return node not in self.excluded and len(self.excluded) < self._limits.max_excluded_nodes

    def _take_back(self, ones: list[Element], reason: str, now_s: float) -> list[Action]:
        """Cancel elements that nothing is the matter with."""
        actions: list[Action] = [Cancel(tuple(one.name for one in ones))] if ones else []
        for one in ones:
            actions += self._end(one, "left", reason, now_s)
        return actions

    def _count(self, data: Mapping[str, Any], now_s: float) -> None:
        self.elements.pop(str(data["member"]), None)
        self._ended[str(data["member"])] = now_s
        if data["how"] == "failure":
            node, reason = str(data["node"]), str(data["reason"])
            cause = cause_in([reason.encode()])
            nodes = (node,) if node and (cause or not data.get("alone")) else ()
            end = ExitDecision(ExitAction.RESTART, message=reason, failed_on=nodes, cause=cause)
            self._ends.append(end)
            self.failures += not (cause and self._may_exclude(node))  # else it is the node's
            where = f" on {node}" if node else ""
            self._last_failure = f"{data['member']}{where}: {reason}"
        elif data["how"] == "preemption":
            self._ends.append(None)
            self.preemptions += 1

    # --- what follows
    # --------------------------------------------------------------------------------------------

    @property
    def is_unsettled(self) -> bool:
        """Whether Slurm may soon have news."""
        return any(one.state != "running" or not one.has_joined for one in self.elements.values())

    def verdict(self) -> tuple[str, str] | None:
        """Why the run cannot go on: one word for programs and a sentence, or None."""
        limits = self._limits
        if self.failures > limits.backoff_limit:
            return "BackoffLimitExceeded", (
                f"{self.failures} members have failed, and runPolicy.backoffLimit is "
                f"{limits.backoff_limit}; the last, {self._last_failure}"
            )
        most = limits.preemption_limit
        if most is not None and self.preemptions > most:
            return "PreemptionLimitExceeded", (
                f"{self.preemptions} members were preempted, and runPolicy.preemptionLimit is "
                f"{most}"
            )
        return None

    def wanted(self, count: int, *, training: Collection[str], now_s: float) -> list[Action]:
        """What brings the number of elements to ``count``; ``training`` are never cancelled: the
        coordinator has them leave."""
        if self._is_complete:
            return []
        counted = [one for one in self.elements.values() if one.counts]
        missing = count - len(counted)
        if missing >= 0:
            base = min(missing, self._plan.base - sum(one.is_base for one in counted))
            wanted = [Submit(max(0, base), True), Submit(missing - max(0, base), False)]
            return [one for one in wanted if one.count]
        free = [one for one in reversed(counted) if one.name not in training]
        free.sort(key=lambda one: (one.is_base, one.state != "waiting"))
        return self._take_back(free[:-missing], "fewer members are wanted", now_s)

    @property
    def ended(self) -> frozenset[str]:
        """Those of which Slurm still knows that they have ended; may be read by any thread."""
        return frozenset(list(self._ended))

    def unstarted(self) -> tuple[str, ...]:
        """Those that never had a part in the run."""
        return tuple(one.name for one in self.elements.values() if not one.has_joined)

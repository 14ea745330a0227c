"""The state of a node below ``hydroslurm agent``, folded from the agent's events (pure), and the
quick way to read it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from hydroslurm.core.events import Event, EventKind, read_events

_TAIL_BYTES = 16 << 20
"""An agent writes a few lines for each request."""


@dataclass(frozen=True)
class AgentState:
    """Where one node is, as its agent last said.

    Attributes:
        node: number of the node within the job step.
        state: ``started``, then the state that all its ranks share: ``running``, ``parked`` ...,
            else ``mixed``; ``left`` when the agent has ended.
        since_epoch_ns: when the agent said so.
        counts: ranks in each state, as of the last request that was passed on.
        held_for: why ranks are held.
        workers: ranks that it has started.
        asked: the last request that it passed on; None before the first.
        answered: whether all its ranks have done what was asked for; None before that is known.
        status: with which the agent left; None before, and when it failed.
        pid, host: of the agent.
        restart_count: how often the job had been requeued.
    """

    node: int
    state: str
    since_epoch_ns: int
    counts: tuple[tuple[str, int], ...] = ()
    held_for: tuple[str, ...] = ()
    workers: int = 0
    asked: str | None = None
    answered: bool | None = None
    status: int | None = None
    pid: int = 0
    host: str = ""
    restart_count: int = 0


def fold(events: Iterable[Event]) -> AgentState | None:
    """The state after the last event; None when there is no event."""
    state: AgentState | None = None
    for event in events:
        state = _after(state, event)
    return state


def latest(path: Path) -> AgentState | None:
    """The state of the agent that writes this file; None when there is nothing to read."""
    try:
        return fold(read_events(path, most_bytes=_TAIL_BYTES))
    except OSError:
        return None


def _after(state: AgentState | None, event: Event) -> AgentState:
    if state is None or (state.pid, state.restart_count) != (event.pid, event.restart_count):
        state = AgentState(
            node=event.rank,
            state="started",
            since_epoch_ns=event.epoch_ns,
            pid=event.pid,
            host=event.host,
            restart_count=event.restart_count,
        )
    data = event.data
    if event.kind is EventKind.WORKERS_STARTED:
        entered = AgentState(
            state.node, "started", event.epoch_ns, workers=len(data.get("pids", ()))
        )
        return replace(entered, pid=event.pid, host=event.host, restart_count=event.restart_count)
    if event.kind is EventKind.SIGNAL_PASSED_ON:
        return replace(state, asked=data.get("meaning"), answered=None)
    if event.kind is EventKind.NODE_STATE:
        return replace(
            state,
            state=data.get("state", "mixed"),
            since_epoch_ns=event.epoch_ns,
            counts=tuple(sorted(data.get("counts", {}).items())),
            held_for=tuple(data.get("held_for", ())),
            answered=data.get("answered"),
        )
    if event.kind is EventKind.AGENT_LEFT:
        return replace(
            state, state="left", since_epoch_ns=event.epoch_ns, status=data.get("status")
        )
    return state

"""A rank's state, folded from its events (pure), and the quick way to read it from the end of a
file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from hydroslurm.core.events import Event, EventKind, read_events

_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class RankState:
    """Where one rank is.

    Attributes:
        rank: global rank.
        state: ``running``, ``parking`` (the gate is closed), ``parked``, ``stopping``, ``ended``,
            or ``killed``, which only somebody who asked Slurm can know.
        since_epoch_ns: when it entered that state.
        causes: why it is held; empty while running.
        step: training step, None when the rank never told.
        pid: its process; changes over requeues.
        host: where it runs.
        restart_count: how often the job had been requeued.
        pauses: how many pauses this attempt has had.
        park_us: latency of the latest park, microseconds; None before the first.
        committed_step: newest step that is saved durably; None when nothing is, or nobody tells.
        world_size: ranks that this one is joined with, itself included; 1 while it is alone.
        not_copied: why its last save held the training up until it was written; None where it was
            copied.
        all_parked_epoch_ns: since when all of them are parked at the same collectives; None while
            they are not.
        children_parked: processes that it started and that are parked with it.
        children_running: those that go on while it is parked.
    """

    rank: int
    state: str
    since_epoch_ns: int
    causes: tuple[str, ...] = ()
    step: int | None = None
    pid: int = 0
    host: str = ""
    restart_count: int = 0
    pauses: int = 0
    park_us: float | None = None
    committed_step: int | None = None
    world_size: int = 1
    all_parked_epoch_ns: int | None = None
    not_copied: str | None = None
    children_parked: tuple[int, ...] = ()
    children_running: tuple[int, ...] = ()

    @property
    def message(self) -> str:
        """The state, of no more than is in it."""
        if self.children_running:
            return f"main process {self.state}"
        return f"{self.state} together" if self.parked_together else self.state

    @property
    def children_message(self) -> str:
        """What its children do meanwhile, and what to do about it; empty where that is nothing."""
        if running := self.children_running:
            one = len(running) == 1
            pids = ", ".join(map(str, running[:8])) + (" ..." if len(running) > 8 else "")
            return (
                f"{len(running)} child{'' if one else 'ren'} of it run{'s' if one else ''} on "
                f"({'pid' if one else 'pids'} {pids}): pause {'it' if one else 'them'} with kill "
                "-STOP and -CONT, or have hydroslurm.install() called where they train"
            )
        if parked := len(self.children_parked):
            return f"{parked} child{' stands' if parked == 1 else 'ren stand'} still with it"
        return ""

    @property
    def parked_together(self) -> bool:
        """Whether all ranks are held, none of them before a collective that another is in."""
        return self.state == "parked" and self.all_parked_epoch_ns is not None


_ENTERS = {
    EventKind.INSTALLED: "running",
    EventKind.GATE_CLOSED: "parking",
    EventKind.PARKED: "parked",
    EventKind.RESUMED: "running",
    EventKind.STOP_REQUESTED: "stopping",
    EventKind.UNINSTALLED: "ended",
}


def fold(events: Iterable[Event]) -> RankState | None:
    """The state after the last event; None when there is no event."""
    state: RankState | None = None
    for event in events:
        state = after(state, event)
    return state


def latest(path: Path) -> RankState | None:
    """The state of the rank that writes this file, from its last 64 KiB, with moments by the date
    of now; None when there is nothing to read."""
    try:
        return fold(one.dated_now() for one in read_events(path, most_bytes=_TAIL_BYTES))
    except OSError:
        return None


def after(state: RankState | None, event: Event) -> RankState:
    """The state after one more event; of any event that :meth:`Event.from_json` has read."""
    if state is None or event.kind is EventKind.INSTALLED:
        committed_step = state.committed_step if state else None
        state = RankState(
            rank=event.rank,
            state="running",
            since_epoch_ns=event.epoch_ns,
            committed_step=committed_step,
        )
    state = replace(
        state,
        step=state.step if event.step is None else event.step,
        pid=event.pid,
        host=event.host,
        restart_count=event.restart_count,
    )
    if "causes" in event.data:
        state = replace(state, causes=tuple(event.data["causes"]))
    # a rank that is let through to a collective parks again: the first time is what was measured
    if event.kind is EventKind.PARKED and state.state != "parked":
        state = replace(state, park_us=event.data.get("park_us"))
    if "pause" in event.data:
        state = replace(state, pauses=event.data["pause"])
    if event.kind is EventKind.SAVE_COMMITTED and event.data.get("tier") == "durable":
        state = replace(state, committed_step=event.data.get("checkpoint_step"))
    if event.kind in (EventKind.SAVE_STAGED, EventKind.SAVE_NOT_COPIED):
        is_copied = event.kind is EventKind.SAVE_STAGED
        state = replace(state, not_copied=None if is_copied else event.data.get("reason"))
    state = _with_children(_among_others(state, event), event)
    entered = _ENTERS.get(event.kind)
    # a stop opens the gate: what follows it is the way out, not a return to running
    if entered in (None, state.state) or (state.state == "stopping" and entered == "running"):
        return state
    return replace(state, state=str(entered), since_epoch_ns=event.epoch_ns)


def _with_children(state: RankState, event: Event) -> RankState:
    """What those below it do while it is parked."""
    if event.kind is EventKind.CHILDREN:
        data = event.data
        return replace(
            state,
            children_parked=tuple(data.get("parked_pids", ())),
            children_running=tuple(data.get("running_pids", ())),
        )
    if event.kind in (EventKind.GATE_CLOSED, EventKind.RESUMED):
        return replace(state, children_parked=(), children_running=())
    return state


def _among_others(state: RankState, event: Event) -> RankState:
    """What several ranks add to it."""
    kind = event.kind
    if kind in (EventKind.RANKS_JOINED, EventKind.PARKED):
        return replace(state, world_size=event.data.get("world_size", state.world_size))
    if kind is EventKind.AGREEMENT_FAILED and event.data.get("what") == "connection":
        return replace(state, world_size=1)
    if kind is EventKind.COORDINATOR_LOST:
        return replace(state, all_parked_epoch_ns=None)
    if kind is EventKind.ALL_PARKED:
        return replace(state, all_parked_epoch_ns=event.epoch_ns)
    since_epoch_ns = state.all_parked_epoch_ns
    # two threads write: the line of a closing may follow that of the agreement which came of it
    if kind in (EventKind.GATE_CLOSED, EventKind.RESUMED) and (
        since_epoch_ns is not None and event.epoch_ns > since_epoch_ns
    ):
        return replace(state, all_parked_epoch_ns=None)
    return state

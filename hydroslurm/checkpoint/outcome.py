"""What a save has become, and what is told on the way."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hydroslurm.checkpoint.deadline import Action
from hydroslurm.checkpoint.store import Checkpoint
from hydroslurm.checkpoint.tiers import Tier


class SaveEventKind(str, Enum):
    """What can happen to a save. The value is the word in a run's events."""

    STARTED = "save_started"
    STAGED = "save_staged"
    NOT_COPIED = "save_not_copied"
    WRITTEN = "save_written"
    COMMITTED = "save_committed"
    FAILED = "save_failed"
    SKIPPED = "save_skipped"
    ABANDONED = "save_abandoned"


@dataclass(frozen=True)
class SaveEvent:
    """One thing that happened to one save.

    Attributes:
        kind: what happened.
        mono_ns: when, CLOCK_MONOTONIC, nanoseconds.
        step: whose state it is.
        save_kind: ``periodic``, ``stop``, ``manual`` or ``epoch``.
        tier: where to; None when it concerns the save as a whole.
        state_bytes: size of its tensors.
        seconds: STAGED: how long the training stood still; WRITTEN: how long until all that this
            rank has to write was on this tier's disk, so that only the commit is left; COMMITTED,
            FAILED, ABANDONED: how long this tier took; else 0.
        reason: why it was skipped, failed, given up or not copied; for people.
    """

    kind: SaveEventKind
    mono_ns: int
    step: int
    save_kind: str
    tier: Tier | None = None
    state_bytes: int = 0
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Saved:
    """What a save has come to by the time its caller goes on.

    Attributes:
        step: whose state was to be saved.
        tier: the safest tier on which that state is committed; None: on none, the last good one is
            kept.
        checkpoint: the committed one; without a tier the newest older durable one, None when there
            is none.
        steps_at_risk: steps completed since the newest durable checkpoint: what is lost if only
            that survives. 0 also where that is an earlier save of the same step.
        reason: what was chosen and what came of it, in words.
        choice: what was chosen at a deadline; None without one.
        stall_s: what copying the state took.
        took_s: from the call until it returned.
        still_writing: a durable save goes on in the background. It can still be committed while the
            process lives (``Saver.wait``), and an interpreter that shuts down waits for it. Where
            there was no memory for a copy, leave the state alone until then.
    """

    step: int
    tier: Tier | None
    checkpoint: Checkpoint | None
    steps_at_risk: int
    reason: str
    choice: Action | None = None
    stall_s: float = 0.0
    took_s: float = 0.0
    still_writing: bool = False

"""Values of an elastic run's state machine: sizes, timing, members, changes, the coordinator's
actions, and directives to a rank."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from hydroslurm.core.exitcodes import FAILED, RUN_AGAIN

Rank = tuple[str, int]
"""A member, and one of its processes on that node, from 0."""
Message = dict[str, Any]
Batch = Literal["keep_global", "per_rank"]
Summation = Literal["all_reduce", "fixed_order"]
LearningRate = Literal["none", "linear", "sqrt"]
CONNECTION_ENDED = "its connection ended"
"""All that is known of a member that vanished."""
MEETING_S = 20.0
"""Longest wait for another rank's value while a generation forms: all ranks hold then, and do
nothing else. A meeting that times out is retried once all hold."""


class Phase(enum.Enum):
    """Phase of a run; see :mod:`hydroslurm.elastic.membership`."""

    WAITING = enum.auto()
    TRAINING = enum.auto()
    CALLING = enum.auto()
    HOLDING = enum.auto()
    BREAKING = enum.auto()
    DECIDING = enum.auto()
    SAVING = enum.auto()
    FORMING = enum.auto()
    SUSPENDED = enum.auto()
    TAIL = enum.auto()
    FINISHED = enum.auto()
    FAILED = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Size:
    """How many members a run may have.

    Attributes:
        min: with fewer, the run waits.
        max: no more join.
        wanted: how many should train now.
        spares: how many more are kept ready.

    Raises:
        ValueError: they contradict each other.
    """

    min: int = 1
    max: int = 1
    wanted: int = 1
    spares: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.wanted <= self.max:
            raise ValueError(
                f"elastic sizes min={self.min}, wanted={self.wanted}, max={self.max}: "
                "1 <= min <= wanted <= max is needed"
            )
        if self.spares < 0:
            raise ValueError(f"spares={self.spares}: 0 or more are needed")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Timeouts, in seconds.

    Attributes:
        gather_s: how long a generation that could begin waits for missing members.
        join_s: how long a ready newcomer waits for others to join with it.
        silent_s: a rank silent for longer counts as dead.
        stuck_s: a live rank that others in its generation wait for in one step for longer counts
            as dead: half of the timeout of their collectives.
        return_s: how long ranks have to reconnect to a new coordinator.
        observe_s: interval of the autoscaler's observations, and of its squeue calls.
    """

    gather_s: float = 3.0
    join_s: float = 0.2
    silent_s: float = 5.0
    stuck_s: float = 900.0
    return_s: float = 15.0
    observe_s: float = 30.0


@dataclass(frozen=True)
class Awaited:
    """What other processes of a generation wait for while an agent's own lag.

    Attributes:
        collectives: how many the furthest has issued; 0: none waits in one.
        meeting_s: timeout of ``init_process_group``, which they are in; 0: none is.
        ended: they have trained to the end.
    """

    collectives: int = 0
    meeting_s: float = 0.0
    ended: bool = False


@dataclass(frozen=True)
class Send:
    """A message for one rank."""

    to: Rank
    message: Message


@dataclass(frozen=True)
class Close:
    """Close this rank's connection."""

    rank: Rank


@dataclass(frozen=True)
class Record:
    """A line of the ledger: an event of the run."""

    kind: str
    data: Message


Action = Send | Close | Record


@dataclass
class MemberState:
    """One node, as the coordinator sees it.

    Attributes:
        local_size: number of its ranks; each becomes ready, and may be paused, separately.
        leaving: why it has to go; "" if it stays.
        failure: the failure it has reported.
        order: joining order of the members.
    """

    id: str
    node: str
    local_size: int
    order: int
    since_s: float
    present: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    paused: set[int] = field(default_factory=set)
    leaving: str = ""
    failure: str = ""

    @property
    def is_ready(self) -> bool:
        return len(self.ready) == self.local_size

    @property
    def ranks(self) -> list[Rank]:
        return [(self.id, local) for local in range(self.local_size)]


@dataclass
class Arrival:
    """A rank holds after this step; ``failed``: it began the next one and dropped it. Step -1:
    it does not have the run's state yet."""

    step: int
    failed: bool = False
    final: bool = False


@dataclass
class Change:
    """The current change.

    Attributes:
        order: members when it began; a replacement takes over its predecessor's ranks.
        proposals: rank -> next step after which it can hold.
        arrivals: ranks that hold.
        to_form: ranks that have not met the forming generation yet.
        ended: ranks of it that had nothing to train, and already hold.
        culprit: member with the first reported failure.
        is_whole: no rank is lost, and no collective has failed.
        resumes_behind: step after which the formed ranks train on.
    """

    number: int
    phase: Phase
    since_s: float
    cause: str
    order: tuple[str, ...] = ()
    proposals: dict[Rank, int] = field(default_factory=dict)
    arrivals: dict[Rank, Arrival] = field(default_factory=dict)
    to_form: set[Rank] = field(default_factory=set)
    ended: dict[Rank, Arrival] = field(default_factory=dict)
    culprit: str = ""
    is_whole: bool = True
    lost: list[str] = field(default_factory=list)
    steps_lost: int = 0
    resumes_behind: int | None = None
    pause_s: float = 0.0
    joined: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    saver: Rank | None = None
    saved: bool = False

    @property
    def holders(self) -> set[Rank]:
        """The ranks that hold after the newest step; empty if none has the run's state."""
        newest = max([0, *(a.step for a in self.arrivals.values())])
        return {rank for rank, a in self.arrivals.items() if a.step == newest}


class Refused(ValueError):
    """A rank may not join this run; the message says why.

    Attributes:
        again: the same process may try again later.
    """

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(message)
        self.again = again


# --- directives to a rank that holds between two steps


@dataclass(frozen=True)
class Form:
    """Meet the others of a new generation; see ``form`` in :mod:`hydroslurm.elastic.messages`.

    Attributes:
        source: the rank that has the state; if ``fresh``, no rank has, and this one loads the
            newest checkpoint.
        needs: ranks that get the state from it.
    """

    change: int
    generation: int
    rank: int
    world_size: int
    members: int
    source: int
    needs: tuple[int, ...]
    fresh: bool
    cause: str
    since_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Save:
    """Save, since too few members are left to go on; then report it."""

    change: int


@dataclass(frozen=True)
class Average:
    """Average the weights over all ranks of the generation, which also hold after this step; then
    call the safe point again."""


@dataclass(frozen=True)
class Depart:
    """This rank leaves the run.

    Attributes:
        again: a restarted process may join again, as after its generation went on without it.
        failed: it cannot go on, rather than having been ordered to leave.
    """

    reason: str
    again: bool = False
    failed: bool = False

    def exit_status(self, *, stops: bool = False) -> int:
        """The status for its process. ``stops``: it was asked to stop, too."""
        if self.failed:
            return FAILED
        return RUN_AGAIN if self.again or stops else 0


@dataclass(frozen=True)
class Finished:
    """All ranks have trained to the end."""


Directive = Form | Save | Depart | Finished

"""What the state machine of an elastic run is about: sizes and times, members and changes, what it
has others do, and what a rank is then told. Plain values."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Any

Rank = tuple[str, int]
"""A member and the place of one of its processes on that node, from 0."""
Message = dict[str, Any]
CONNECTION_ENDED = "its connection ended"
"""All that is known of a member that has gone without a word."""
MEETING_S = 20.0
"""So long a rank waits for what another says while a generation forms: all hold by then, and do
nothing else. A meeting that fails for that is tried again, once all hold."""


class Phase(enum.Enum):
    """Of a change; see :mod:`hydroslurm.elastic.membership`."""

    CALLING = "calling"
    HOLDING = "holding"
    BREAKING = "breaking"
    SAVING = "saving"
    FORMING = "forming"
    SUSPENDED = "suspended"


@dataclass(frozen=True, kw_only=True)
class Size:
    """How many members a run may have.

    Attributes:
        min: fewer do not train, they wait.
        max: more are not taken in.
        wanted: how many are to train now.
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
    """In seconds.

    Attributes:
        gather_s: a generation that could begin waits so long for members that are still missing.
        join_s: as long newcomers are waited for that may come together with one that is ready.
        silent_s: a rank that says nothing for so long is taken for dead.
        stuck_s: a rank that lives, and for which the others of its generation wait so long in one
            step, is taken for dead: half of the time-out of their collectives.
        return_s: ranks that a new coordinator has not heard of yet may take so long to come back.
        observe_s: between two observations of the autoscaler, which asks squeue as often.
    """

    gather_s: float = 3.0
    join_s: float = 0.2
    silent_s: float = 5.0
    stuck_s: float = 900.0
    return_s: float = 15.0
    observe_s: float = 30.0


@dataclass(frozen=True)
class Awaited:
    """What other processes of a generation wait for, those of an agent in it being behind.

    Attributes:
        collectives: so many the furthest has issued; 0: nobody waits in one.
        meeting_s: they are in ``init_process_group``, which fails after so long; 0: none is.
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
    """The rank's connection is of no use any more."""

    rank: Rank


@dataclass(frozen=True)
class Record:
    """A line of the ledger: what has happened to the run."""

    kind: str
    data: Message


Action = Send | Close | Record


@dataclass
class MemberState:
    """One node, as the coordinator sees it.

    Attributes:
        local_size: how many ranks it has; each is ready by itself, and may be paused.
        leaving: why it is to go, "" while it is to stay.
        failure: what has failed there, as it has said itself.
        order: counts the members as they came.
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
    """A rank holds: behind this step; ``failed``: the one after it was begun and dropped. A step
    of -1: it has no state of the run yet."""

    step: int
    failed: bool = False
    final: bool = False


@dataclass
class Change:
    """The change that is under way.

    Attributes:
        order: the members when it began: one that takes another's place takes its ranks, too.
        proposals: rank -> the next step behind which it can hold.
        arrivals: the ranks that hold.
        to_form: the ranks of the generation that is forming that do not have it yet.
        ended: ranks of it that had nothing to train, and hold already.
        culprit: the member where something failed first, if one has said so.
        resumes_behind: the step behind which the ranks that have formed train on.
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
    lost: list[str] = field(default_factory=list)
    steps_lost: int = 0
    resumes_behind: int | None = None
    joined: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    saver: Rank | None = None
    saved: bool = False


class Refused(ValueError):
    """A rank that has no place in this run; the message says why.

    Attributes:
        again: it may have one later, as the process that it is.
    """

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(message)
        self.again = again


# --- what a rank is told to do once it holds between two steps, and what becomes of it


@dataclass(frozen=True)
class Form:
    """Meet the others of a new generation; see ``form`` in :mod:`hydroslurm.elastic.messages`.

    Attributes:
        source: the rank that has the state; with ``fresh`` nobody has, and it loads the newest
            checkpoint.
        needs: the ranks that get it from there.
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
    """Save, for too few are left to go on; then say so."""

    change: int


@dataclass(frozen=True)
class Average:
    """Make the weights equal with all ranks of the generation, which hold behind this step, too;
    then come to the safe point again."""


@dataclass(frozen=True)
class Depart:
    """This rank has nothing more to do with the run.

    Attributes:
        again: started anew it may join again, as one whose generation went on without it.
        failed: that is no order, but the end of what cannot go on.
    """

    reason: str
    again: bool = False
    failed: bool = False


@dataclass(frozen=True)
class Finished:
    """All ranks have trained to the end."""


Directive = Form | Save | Average | Depart | Finished

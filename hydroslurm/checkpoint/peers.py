"""What the ranks of a save need of each other, and what they tell each other.

A rank that fails says so in its answer, so that the others do not wait for it and all raise the
same message; the agreement itself names a rank that is gone. A world of one asks nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from hydroslurm.errors import (
    AgreementFailed,
    CheckpointError,
    HydroslurmError,
    RanksError,
    SaveAbandoned,
    SaveFailed,
    StaleAttempt,
    UnsavableState,
)

PATIENCE_S = 600.0
"""How long to wait for the others: for the slowest disk, or a rank that is a step behind."""

KEPT = "Checkpoints that were committed before are whole"


class SaveSkipped(CheckpointError):
    """A rank still saves an older step, so that no rank begins this save. A disk that cannot keep
    up must not hold up the training."""


_KINDS: dict[str, type[HydroslurmError]] = {
    "skipped": SaveSkipped,
    "stale": StaleAttempt,
    "unsavable": UnsavableState,
    "abandoned": SaveAbandoned,
    "failed": SaveFailed,
}


T = TypeVar("T")


class Peers(Protocol):
    """What a joint save needs of the ranks: all-or-none agreement. Thread-safe."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def agree(
        self,
        topic: str,
        value: Any,
        *,
        timeout_s: float | None = None,
        cancel: threading.Event | None = None,
        among: Sequence[int] | None = None,
        collect_at: Collection[int] | None = None,
    ) -> Mapping[int, Any]:
        """Submit a value and get those of all ranks, in rank order.

        All ranks have the same outcome: all values, or the same error. A rank that asks after the
        decision gets the decision.

        Args:
            topic: names the agreement; used once per job.
            value: plain JSON. It goes to all ranks: one that many ranks have alike costs little,
                those that differ have to be small.
            timeout_s: give up after so long, for all ranks. Time during which this process was
                stopped does not count. None: wait until a rank is gone.
            cancel: give up when it is set.
            among: the ranks that take part, including this one; the same on all of them. Default:
                all.
            collect_at: the ranks, at most four, that this value goes to; the others wait for it,
                and do not get it. Each rank says so for its own value, so that of several thousand
                one that has failed can tell all, and the others only the rank that needs to know.

        Raises:
            AgreementFailed: a rank has died, left or given up.
            CoordinatorLost: the ranks are no longer connected.
        """


class Solo:
    """A world of one, which agrees with itself at once."""

    rank = 0
    world_size = 1

    def agree(self, topic: str, value: Any, **_: Any) -> Mapping[int, Any]:  # noqa: ARG002
        return {0: value}


SOLO: Peers = Solo()


def failed(error: BaseException) -> dict[str, Any]:
    """The answer of a rank that has failed."""
    kind = next((name for name, one in _KINDS.items() if isinstance(error, one)), "failed")
    return {"failed": [kind, _message(error)]}


def parsed(kind: type[T], answer: Any, *, rank: int) -> T:
    """The answer of another rank as a dataclass, each field of its declared type.

    It is not trusted: it decides which folders are made and removed and which files are opened.

    Raises:
        SaveFailed: a field is missing or has another type.
    """
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise SaveFailed(
            f"rank {rank} answers {_short(answer)}, which is not what is sent ({error}). "
            "Do all ranks run the same release?"
        ) from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def raise_failures(answers: Mapping[int, Any], not_saved: str) -> None:
    """If ranks have failed, raise the same error on all ranks, which names them and says why."""
    failures = {
        rank: _failure(answer["failed"])
        for rank, answer in answers.items()
        if isinstance(answer, Mapping) and "failed" in answer
    }
    if not failures:
        return
    kinds = {kind for kind, _ in failures.values()}
    if kinds == {SaveSkipped}:
        busy = ", ".join(map(str, failures))
        raise SaveSkipped(f"{next(iter(failures.values()))[1]} (on rank {busy})")
    kinds.discard(SaveSkipped)
    # a newer attempt takes precedence: retrying cannot help
    first = StaleAttempt if StaleAttempt in kinds else next(iter(kinds))
    kind = first if first is StaleAttempt or len(kinds) == 1 else SaveFailed
    told = "; ".join(f"rank {rank}: {message}" for rank, (_, message) in failures.items())
    raise kind(f"{not_saved} {told}. {KEPT}")


def _failure(told: Any) -> tuple[type[HydroslurmError], str]:
    if not (isinstance(told, list) and len(told) == 2 and isinstance(told[0], str)):
        return SaveFailed, f"failed, and does not say why ({_short(told)})"
    return _KINDS.get(told[0], SaveFailed), str(told[1])


def why(error: RanksError) -> str:
    """Which ranks an agreement lacks, for people; the same text on all ranks."""
    if not isinstance(error, AgreementFailed):
        return f"the ranks could not agree ({error})"
    told = [
        f"{_ranks(ranks)} {what}"
        for ranks, what in (
            (error.missing, "gone (died or left)"),
            (error.withdrawn, "no longer waiting for the others"),
        )
        if ranks
    ]
    return " and ".join(told) or f"the ranks could not agree ({error})"


def gone(error: RanksError) -> tuple[int, ...]:
    """The ranks that will not come back."""
    return error.missing if isinstance(error, AgreementFailed) else ()


def _ranks(ranks: Sequence[int]) -> str:
    """ "rank 3 is", "ranks 1, 3 are"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, ranks))} are"


def _message(error: BaseException) -> str:
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error}{where}"
    if isinstance(error, (CheckpointError, StaleAttempt)):
        return str(error)
    return f"{type(error).__name__}: {error}"

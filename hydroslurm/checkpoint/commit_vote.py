"""The agreements of one joint save: what a rank answers, and what all ranks raise.

A rank that has failed says so in its answer, so that the others need not wait for it, and all raise
the same words. A rank that is gone is named by the agreement itself.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from hydroslurm.checkpoint.peers import Peers
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
"""How long the others are waited for: for the slowest disk, and a rank that is a step behind."""

KEPT = "Checkpoints that were committed before are whole"

_KINDS: dict[str, type[HydroslurmError]] = {
    "stale": StaleAttempt,
    "unsavable": UnsavableState,
    "abandoned": SaveAbandoned,
    "failed": SaveFailed,
}


@dataclass(frozen=True)
class CommitVote:
    """The agreements of one save.

    Attributes:
        topic: begins their names; the same on all ranks, and used for one save only.
        timeout_s: how long each of them waits for the others.
        cancel: gives up waiting.
    """

    peers: Peers
    topic: str
    step: int
    timeout_s: float
    cancel: threading.Event | None = None

    def agree(self, what: str, value: Any, *, among: Sequence[int] | None = None) -> Any:
        """Everybody's values; raises RanksError."""
        return self.peers.agree(
            f"{self.topic}/{what}",
            value,
            timeout_s=self.timeout_s,
            cancel=self.cancel,
            among=among,
        )

    def agree_before_commit(self, what: str, value: Any) -> Mapping[int, Any]:
        """Everybody's values; raises what ends the save when a rank has failed or is gone."""
        try:
            answers: Mapping[int, Any] = self.agree(what, value)
        except RanksError as error:
            kind = SaveAbandoned if self._canceled and not gone(error) else SaveFailed
            raise kind(f"{self.not_saved} {why(error)}. {KEPT}") from error
        raise_failures(answers, self.not_saved)
        return answers

    @property
    def not_saved(self) -> str:
        return f"step {self.step} was not saved:"

    @property
    def _canceled(self) -> bool:
        return self.cancel is not None and self.cancel.is_set()


def decline(meeting: CommitVote, error: BaseException) -> NoReturn:
    """Take part in a save only to say that this rank cannot; raises what all ranks raise."""
    meeting.agree_before_commit("open", failed(error))
    raise AssertionError("an answer that says so is a failure")


def failed(error: BaseException) -> dict[str, Any]:
    """The answer of a rank that has failed."""
    kind = next((name for name, one in _KINDS.items() if isinstance(error, one)), "failed")
    return {"failed": [kind, _words(error)]}


def checked(answer: Any, *, rank: int, **types: type | tuple[type, ...]) -> dict[str, Any]:
    """The answer of another rank, which has these fields with values of these types.

    It is checked like a stranger's: folders are made and removed, and files opened, by what stands
    in it. A number that is to be calculated with is asked for as ``(int, float)``; True and False
    are none.

    Raises:
        SaveFailed: a field is missing or of another type.
    """
    for name, wanted in types.items():
        value = answer.get(name) if isinstance(answer, Mapping) else None
        is_flag = isinstance(value, bool) and wanted is not bool
        if not isinstance(answer, Mapping) or is_flag or not isinstance(value, wanted):
            raise SaveFailed(
                f"rank {rank} answers {_short(answer)}, which has no {name} as it is sent. "
                "Do all ranks run the same release?"
            )
    return dict(answer)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def raise_failures(answers: Mapping[int, Any], not_saved: str) -> None:
    """Raise the same on all ranks, naming those that have failed and why, if any has."""
    failures = {
        rank: _failure(answer["failed"])
        for rank, answer in answers.items()
        if isinstance(answer, Mapping) and "failed" in answer
    }
    if not failures:
        return
    kinds = {kind for kind, _ in failures.values()}
    # whatever else went wrong, nothing can be done about a newer attempt
    first = StaleAttempt if StaleAttempt in kinds else next(iter(kinds))
    kind = first if first is StaleAttempt or len(kinds) == 1 else SaveFailed
    told = "; ".join(f"rank {rank}: {words}" for rank, (_, words) in failures.items())
    raise kind(f"{not_saved} {told}. {KEPT}")


def _failure(told: Any) -> tuple[type[HydroslurmError], str]:
    if not (isinstance(told, list) and len(told) == 2 and isinstance(told[0], str)):
        return SaveFailed, f"failed, and does not say why ({_short(told)})"
    return _KINDS.get(told[0], SaveFailed), str(told[1])


def why(error: RanksError) -> str:
    """Which ranks an agreement lacks, in words that are the same on all ranks."""
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


def _words(error: BaseException) -> str:
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error}{where}"
    if isinstance(error, (CheckpointError, StaleAttempt)):
        return str(error)
    return f"{type(error).__name__}: {error}"

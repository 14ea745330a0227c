"""The search for the newest good checkpoint, the same on all ranks."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from hydroslurm.checkpoint import folders
from hydroslurm.checkpoint.catalog import Checkpoint, Problem, as_told
from hydroslurm.checkpoint.save_round import checked
from hydroslurm.checkpoint.store import CheckpointStore
from hydroslurm.errors import CheckpointCorrupt, CheckpointError

LOOKS = 3
"""At a folder in which another process removes what has just been listed."""


@dataclass(frozen=True)
class Found:
    """A checkpoint and the store that can load it."""

    store: CheckpointStore
    checkpoint: Checkpoint


Load = Callable[[Found], object]
"""Loads a candidate, which verifies what this rank needs of it. It raises CheckpointError or
OSError for one that cannot be used."""


def newest_good(
    store: CheckpointStore,
    *,
    topic: str = "newest",
    timeout_s: float | None = None,
    load: Load | None = None,
) -> Found | None:
    """The newest committed checkpoint that is good, the same on all ranks; None when there is none
    at all.

    What is newer and cannot be used costs one RuntimeWarning, on rank 0, that says why and names
    what is used instead.

    With several ranks every one calls it. Rank 0 proposes, each loads what it needs or, without
    ``load``, verifies a share of the files, and a candidate that one rank rejects is rejected by
    all.

    Args:
        store: of all ranks, with its peers.
        topic: begins those of the ranks' agreements; used once per job.
        timeout_s: for each agreement; None waits until a rank is gone.
        load: keeps what it has loaded last for the caller; nothing of it may be used before this
            function has returned.

    Raises:
        CheckpointCorrupt: there are some, and none is good: starting over must be a decision.
        CheckpointError: the store cannot be listed.
        AgreementFailed, CoordinatorLost: a rank is gone.
    """
    return _Search(store, topic=topic, timeout_s=timeout_s, load=load).run()


class _Search:
    """One rank's part in one search."""

    def __init__(
        self,
        store: CheckpointStore,
        *,
        topic: str,
        timeout_s: float | None,
        load: Load | None,
    ) -> None:
        self._load = load
        self._store = store
        self._peers = store.peers
        self._candidates = _Candidates(store)
        self._topic = topic
        self._timeout_s = timeout_s

    def run(self) -> Found | None:
        """Verify one candidate after the other, until one is good."""
        for turn in itertools.count():
            found = self._next(turn)
            if found is None:
                return None
            bad = self._complaints(turn, found)
            if bad is None:
                self._store.checker.trust(found.checkpoint)
                if self._peers.rank == 0:
                    self._candidates.warn_of_rejected(found.checkpoint)
                return found
            if self._peers.rank == 0:
                self._candidates.reject(found.checkpoint, bad)
        raise AssertionError("the candidates come to an end")

    def _next(self, turn: int) -> Found | None:
        """The next candidate of rank 0, on all ranks; None when there is nothing at all."""
        if self._peers.world_size == 1:
            found = self._candidates.next()
            _require_none_rejected(found, self._candidates.rejected)
            return found
        offer = self._offer() if self._peers.rank == 0 else None
        told = self._agree(str(turn), offer)[0]
        if isinstance(told, dict) and isinstance(told.get("failed"), str):
            raise CheckpointError(told["failed"])
        checked(told, rank=0, rejected=list, name=(str, NoneType))
        if told["name"] is None:
            _require_none_rejected(None, told["rejected"])
            return None
        checked(told, rank=0, manifest=str)
        if folders.step_of(told["name"]) is None:
            raise CheckpointError(
                f"rank 0 names {told['name'][:80]!r}, which is no checkpoint's name; expected one "
                f"such as step-000000084, in {self._store.directory}"
            )
        return Found(self._store, as_told(told, self._store.directory / told["name"]))

    def _offer(self) -> dict[str, Any]:
        """What rank 0 tells the others: a candidate, or what came of all of them."""
        try:
            found = self._candidates.next()
        except (CheckpointError, OSError) as error:
            return {"failed": str(error)}
        if found is None:
            return {"rejected": self._candidates.rejected, "name": None}
        one = found.checkpoint
        summary = one.manifest.summary().to_json()
        return {"rejected": [], "name": one.path.name, "manifest": summary}

    def _complaints(self, turn: int, found: Found) -> str | None:
        """Why a candidate is rejected, by whichever rank; None when it is good."""
        complaint = None
        try:
            if self._load is None:
                share = (self._peers.rank, self._peers.world_size)
                self._store.checker.verify(found.checkpoint, share=share)
            else:
                self._load(found)
        except (CheckpointError, OSError) as error:
            complaint = str(error)
        if self._peers.world_size == 1:
            return complaint
        answers = self._agree(f"{turn}/verdict", complaint).items()
        bad = [f"rank {rank}: {answer}" for rank, answer in answers if answer is not None]
        return "; ".join(bad) if bad else None

    def _agree(self, what: str, value: Any) -> Mapping[int, Any]:
        return self._peers.agree(f"{self._topic}/{what}", value, timeout_s=self._timeout_s)


class _Candidates:
    """What a store has, newest first. Touches no disk before :meth:`next`.

    Attributes:
        rejected: what cannot be used, and why.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._left: list[Checkpoint | Problem] | None = None
        self._looks = 0
        self.rejected: list[str] = []

    def next(self) -> Found | None:
        """The next one whose manifest can be read, kept from retention; None after the last."""
        while True:
            if self._left is None:
                self._looks += 1
                self._left = self._store.look()
            if not self._left:
                return None
            one = self._left.pop()
            if isinstance(one, Checkpoint):
                self._store.pins.pin(one.path)
                return Found(self._store, one)
            self.reject(one, str(one.error))

    def reject(self, one: Checkpoint | Problem, why: str) -> None:
        """Go on with the next. One that another process has removed meanwhile was followed by
        something newer: then everything is looked at again."""
        if self._looks < LOOKS and not _is_there(self._store, one):
            self._left = None
            self.rejected = []
        else:
            self.rejected.append(f"{one.path} ({why})")

    def warn_of_rejected(self, chosen: Checkpoint) -> None:
        """Say what was rejected, and what is used instead."""
        if self.rejected:
            warnings.warn(
                f"hydroslurm cannot use {', '.join(self.rejected)}; the run continues from "
                f"{chosen.path}",
                RuntimeWarning,
                stacklevel=4,
            )


def _is_there(store: CheckpointStore, one: Checkpoint | Problem) -> bool:
    try:
        return any(other.path == one.path for other in store.look())
    except (CheckpointError, OSError):
        return True


def _require_none_rejected(found: Found | None, rejected: list[str]) -> None:
    if found is None and rejected:
        raise CheckpointCorrupt(
            f"no checkpoint of this run can be loaded: {', '.join(map(str, rejected))}. Remove the "
            "folders to start from the beginning"
        )

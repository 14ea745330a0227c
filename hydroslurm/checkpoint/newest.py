"""The search for the newest good checkpoint, the same on all ranks."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydroslurm.checkpoint import folders
from hydroslurm.checkpoint.catalog import Checkpoint, Problem, as_told
from hydroslurm.checkpoint.save_round import parsed
from hydroslurm.checkpoint.store import CheckpointStore
from hydroslurm.errors import CheckpointCorrupt, CheckpointError


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
    load: Load | None = None,
) -> Found | None:
    """The newest committed checkpoint that is good, the same on all ranks; None when there is none
    at all.

    What is newer and cannot be used costs one RuntimeWarning, on rank 0, that says why and names
    what is used instead.

    With several ranks every one calls it. Rank 0 proposes, each loads what it needs or, without
    ``load``, verifies all files, and a candidate that one rank rejects is rejected by
    all.

    Args:
        store: of all ranks, with its peers.
        topic: begins those of the ranks' agreements; used once per job.
        load: keeps what it has loaded last for the caller; nothing of it may be used before this
            function has returned.

    Raises:
        CheckpointCorrupt: there are some, and none is good: starting over must be a decision.
        CheckpointError: the store cannot be listed.
        AgreementFailed, CoordinatorLost: a rank is gone.
    """
    return _Search(store, topic=topic, load=load).run()


@dataclass(frozen=True)
class _Proposal:
    """Rank 0's: a checkpoint by its name and the summary of its manifest, or why there is none."""

    name: str = ""
    manifest: str = ""
    rejected: tuple[str, ...] = ()
    failed: str = ""


class _Search:
    """One rank's part in one search. Rank 0 goes through what the store has, newest first."""

    def __init__(self, store: CheckpointStore, *, topic: str, load: Load | None) -> None:
        self._store = store
        self._peers = store.peers
        self._topic = topic
        self._load = load
        self._rejected: dict[Path, str] = {}  # what cannot be used, and why

    def run(self) -> Found | None:
        """Verify one candidate after the other, until one is good."""
        for turn in itertools.count():
            checkpoint = self._propose(turn)
            if checkpoint is None:
                return None
            found = Found(self._store, checkpoint)
            bad = self._complaints(turn, found)
            if bad is None:
                self._store.trust(checkpoint)
                if self._rejected and self._peers.rank == 0:
                    warnings.warn(
                        f"hydroslurm cannot use {', '.join(self._reasons())}; the run continues "
                        f"from {checkpoint.path}",
                        RuntimeWarning,
                        stacklevel=3,
                    )
                return found
            self._rejected[checkpoint.path] = bad
        raise AssertionError("the candidates come to an end")

    def _propose(self, turn: int) -> Checkpoint | None:
        """The next candidate of rank 0, on all ranks; None when there is nothing at all."""
        mine, proposal = None, _Proposal()
        if self._peers.rank == 0:
            try:
                mine = self._next()
            except (CheckpointError, OSError) as error:
                proposal = _Proposal(failed=str(error))
            else:
                proposal = _Proposal(rejected=self._reasons())
                if mine is not None:
                    proposal = _Proposal(mine.path.name, mine.manifest.summary().to_json())
        told = parsed(_Proposal, self._agree(str(turn), asdict(proposal))[0], rank=0)
        if told.failed:
            raise CheckpointError(told.failed)
        if mine is not None:
            return mine
        if told.name:
            if folders.key_of(told.name) is None:
                raise CheckpointError(
                    f"rank 0 names {told.name[:80]!r}, which is no checkpoint's name; expected one "
                    f"such as step-000000084, in {self._store.directory}"
                )
            return as_told(told.manifest, self._store.directory / told.name)
        if told.rejected:
            raise CheckpointCorrupt(
                f"no checkpoint of this run can be loaded: {', '.join(told.rejected)}. Remove the "
                "folders to start from the beginning"
            )
        return None

    def _next(self) -> Checkpoint | None:
        """The newest one that is not rejected, kept from retention; None if there is none. What
        another process has removed meanwhile was followed by something newer, and is forgotten."""
        while True:
            found = self._store.look()
            there = {one.path for one in found}
            self._rejected = {path: why for path, why in self._rejected.items() if path in there}
            left = (one for one in reversed(found) if one.path not in self._rejected)
            newest = next(left, None)
            if not isinstance(newest, Problem):
                if newest is not None:
                    self._store.pins.pin(newest.path)
                return newest
            self._rejected[newest.path] = str(newest.error)  # if it is still there

    def _reasons(self) -> tuple[str, ...]:
        return tuple(f"{path} ({why})" for path, why in self._rejected.items())

    def _complaints(self, turn: int, found: Found) -> str | None:
        """Why a candidate is rejected, by whichever rank; None when it is good."""
        complaint = None
        try:
            if self._load is None:
                self._store.verify(found.checkpoint)
            else:
                self._load(found)
        except (CheckpointError, OSError) as error:
            complaint = str(error)
        if self._peers.world_size == 1:
            return complaint
        answers = self._agree(f"{turn}/verdict", complaint).items()
        return "; ".join(f"rank {rank}: {one}" for rank, one in answers if one is not None) or None

    def _agree(self, what: str, value: Any) -> Mapping[int, Any]:
        return self._peers.agree(f"{self._topic}/{what}", value)

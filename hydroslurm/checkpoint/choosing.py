"""Which checkpoint all ranks go on from: proposed by rank 0, verified by all, agreed by all."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any

from hydroslurm.checkpoint import folders, manifest
from hydroslurm.checkpoint.catalog import Checkpoint, Problem
from hydroslurm.checkpoint.manifest import Manifest
from hydroslurm.checkpoint.save_round import Peers, checked
from hydroslurm.checkpoint.store import CheckpointStore
from hydroslurm.checkpoint.tiers import newest_over
from hydroslurm.errors import CheckpointCorrupt, CheckpointError


def choose(
    store: CheckpointStore, *, topic: str = "choose", timeout_s: float | None = None
) -> Checkpoint | None:
    """The newest committed checkpoint that is whole, the same on all ranks; None when there is
    none at all.

    Every rank calls it. Each verifies some of the files, so that they are read once in all. One
    that is not whole, for whichever rank, is passed over with a RuntimeWarning on rank 0.

    Args:
        store: of all ranks, with its peers; without any this is ``newest_over``.
        topic: begins those of the agreements; used once per job.
        timeout_s: for each agreement; None waits until a rank is gone.

    Raises:
        CheckpointCorrupt: there are some, and none is whole: starting over must be a decision.
        CheckpointError: rank 0 cannot list them.
        AgreementFailed, CoordinatorLost: a rank is gone.
    """
    if store.peers.world_size == 1:
        found = newest_over(durable=store)
        return None if found is None else found.checkpoint
    return _Choice(store, store.peers, topic=topic, timeout_s=timeout_s).make()


class _Choice:
    """One rank's part in one choice."""

    def __init__(
        self, store: CheckpointStore, peers: Peers, *, topic: str, timeout_s: float | None
    ) -> None:
        self._store = store
        self._peers = peers
        self._topic = topic
        self._timeout_s = timeout_s
        self._candidates = self._list() if peers.rank == 0 else iter(())
        self._broken: list[str] = []

    def make(self) -> Checkpoint | None:
        """Look at one after the other, until one is good."""
        turn = 0
        while True:
            proposal = self._propose(turn)
            if proposal is None:
                self._check_nothing_broken()
                return None
            verdicts = self._agree(f"{turn}/verdict", self._verdict(proposal)).items()
            bad = [f"rank {rank}: {message}" for rank, message in verdicts if message is not None]
            if not bad:
                self._store.checker.trust(proposal)
                self._warn(proposal)
                return proposal
            self._broken.append(f"{proposal.path} ({'; '.join(bad)})")
            turn += 1

    def _propose(self, turn: int) -> Checkpoint | None:
        """Rank 0's next candidate, on all ranks; None after the last."""
        answer: dict[str, Any] | None = None
        if self._peers.rank == 0:
            answer = self._next()
        told = self._agree(str(turn), answer)[0]
        if isinstance(told, dict) and isinstance(told.get("failed"), str):
            raise CheckpointError(told["failed"])
        checked(told, rank=0, broken=list, name=(str, NoneType))
        self._broken += map(str, told["broken"])
        if told["name"] is None:
            return None
        checked(told, rank=0, manifest=str)
        if folders.step_of(told["name"]) is None:
            raise CheckpointError(
                f"rank 0 names {told['name'][:80]!r}, which is no checkpoint's name; expected one "
                f"such as step-000000084, in {self._store.directory}"
            )
        path = self._store.directory / told["name"]
        return Checkpoint(path, Manifest.from_json(told["manifest"], where=path / manifest.NAME))

    def _next(self) -> dict[str, Any]:
        """The next checkpoint, and the folders between that have no manifest to be read."""
        broken: list[str] = []
        try:
            for one in self._candidates:
                if isinstance(one, Checkpoint):
                    self._store.pins.pin(one.path)
                    text = one.manifest.to_json()
                    return {"broken": broken, "name": one.path.name, "manifest": text}
                broken.append(f"{one.path} ({one.error})")
        except CheckpointError as error:
            return {"failed": str(error)}
        return {"broken": broken, "name": None}

    def _list(self) -> Iterator[Checkpoint | Problem]:
        yield from reversed(self._store.look())

    def _verdict(self, checkpoint: Checkpoint) -> str | None:
        """What is wrong with this rank's part of the files, in words; None: nothing."""
        try:
            share = (self._peers.rank, self._peers.world_size)
            self._store.checker.verify(checkpoint, share=share)
        except (CheckpointError, OSError) as error:
            return str(error)
        return None

    def _check_nothing_broken(self) -> None:
        if self._broken:
            raise CheckpointCorrupt(
                f"no checkpoint of this run can be loaded: {', '.join(self._broken)}. Remove the "
                "folders to start from the beginning"
            )

    def _warn(self, chosen: Checkpoint) -> None:
        if self._broken and self._peers.rank == 0:
            warnings.warn(
                f"hydroslurm cannot use {', '.join(self._broken)}; the run continues from "
                f"{chosen.path}",
                RuntimeWarning,
                stacklevel=4,
            )

    def _agree(self, what: str, value: Any) -> Mapping[int, Any]:
        return self._peers.agree(f"{self._topic}/{what}", value, timeout_s=self._timeout_s)

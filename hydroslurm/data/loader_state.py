"""What changes in a loader from batch to batch, beside its place in the data: the weights of a
sampler, what a transform counts, the generator of a collate function."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import dataloader as torch_dataloader

from hydroslurm.checkpoint import rng
from hydroslurm.checkpoint.census import MOVED, Census, Unkept
from hydroslurm.checkpoint.tree import decode, encode
from hydroslurm.data.epochs import samplers
from hydroslurm.errors import StateMismatch, UnsavableState

_WAIT_S = 60.0
_POLL_S = 0.002


class LoaderState:
    """Of one loader, in this process.

    Args:
        loader: as the script has made it; what does not change from now on is not saved.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._census = Census(
            lambda: {"generators": _generators(loader), "loader": loader},
            without={"loader": ("_iterator",)},  # of an epoch, whose position is saved
            all_generators=True,
        )
        self._census.note()
        self._lost: list[Unkept] = []

    def now(self, *, is_replayed: bool = False) -> dict[str, Any]:
        """Everything that has changed, to be saved; what cannot be saved is said.

        Args:
            is_replayed: the batches of the epoch will be drawn again: iterators move with them.
        """
        state = self._census.state()
        lost = [*self._lost, *self._census.take_lost()]
        self._lost = [one for one in lost if is_replayed and one.why == MOVED]
        _say(str(one) for one in lost if one not in self._lost)
        return state

    def put(self, state: Mapping[str, Any]) -> None:
        """Give the loader's objects these values back.

        Raises:
            StateMismatch: the loader holds generators in other places, or of other kinds.
        """
        there, here = state.get("generators", {}).keys(), _generators(self._loader).keys()
        if there != here:
            raise StateMismatch(
                f"the loader had generators of its own at {sorted(there)} and now has them at "
                f"{sorted(here)}; build it as before"
            )
        try:
            self._census.restore(state)
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise StateMismatch(
                f"what was saved of the loader's objects does not fit them: {error}; build the "
                "loader as before, or begin a new run"
            ) from error


def _generators(loader: Any) -> dict[str, torch.Generator]:
    """What torch's own classes draw from, by its place, each once. Samplers are numbered: what is
    around them is not the same for any number of ranks."""
    found: dict[str, torch.Generator] = {}
    for holder in (loader, *samplers(loader)):
        one = getattr(holder, "generator", None)
        if isinstance(one, torch.Generator) and not any(one is other for other in found.values()):
            found["loader" if holder is loader else f"sampler {len(found)}"] = one
    return found


def keeps_workers(loader: Any) -> bool:
    """Whether workers go on from one epoch to the next, with what they have counted and drawn."""
    return isinstance(loader, DataLoader) and bool(loader.persistent_workers)


class PersistentWorkers:
    """The workers of a loader that keeps them. Each writes down at the beginning of an epoch what
    it has, so that the next attempt can start others in their place and replay the epoch.

    Args:
        state: of the loader in this process.
    """

    def __init__(self, loader: Any, state: LoaderState) -> None:
        self._loader, self._state = loader, state
        self._folder: Path | None = None
        self._made: Mapping[str, Any] = {}
        self._each: list[Mapping[str, Any]] | None = None
        self._is_first = True

    @property
    def are_started(self) -> bool:
        """Whether an epoch has begun."""
        return self._folder is not None

    def begin_epoch(self) -> Iterator[Any]:
        """Iterate the loader; the first time workers are started."""
        if self._folder is None or self._loader._iterator is None:
            return self._start(None)
        self._is_first, self._each = False, None
        for path in self._folder.iterdir():
            path.unlink()
        return iter(self._loader)

    def resume_epoch(self, saved: Mapping[str, Any], put_back: Callable[[], None]) -> Iterator[Any]:
        """Start workers as they were at the beginning of the epoch, and iterate the loader.

        Args:
            put_back: gives this process its random numbers and the loader's objects of that moment.

        Raises:
            StateMismatch: there is another number of workers.
        """
        each = saved["each"]
        if len(each) != self._loader.num_workers:
            raise StateMismatch(
                f"the loader had {len(each)} persistent workers, now it has "
                f"{self._loader.num_workers}; their state cannot be shared out anew. Give it "
                f"num_workers={len(each)}, or persistent_workers=False in a new run"
            )
        if saved["is_first"]:  # they were started by the same draws
            put_back()
            return self._start(each)
        self._state.put(saved["made"])  # they have copies of what was there when they were started
        kind: Any = torch_dataloader._MultiProcessingDataLoaderIter
        reset = kind._reset

        def put_back_and_reset(iterator: Any, loader: Any, first_iter: bool = False) -> None:
            put_back()  # workers are there, nothing was asked of the sampler yet
            reset(iterator, loader, first_iter)

        kind._reset = put_back_and_reset
        try:
            batches = self._start(each)
        finally:
            kind._reset = reset
        self._made, self._is_first = saved["made"], False
        return batches

    def state_dict(self) -> dict[str, Any]:
        """As they were when the current epoch began.

        Raises:
            UnsavableState: one has not begun.
        """
        if self._each is None:
            self._each = [self._read(number) for number in range(self._loader.num_workers)]
            _say(sorted({text for one in self._each for text in one["unkept"]}))
        each = [{"rng": one["rng"], "objects": one["objects"]} for one in self._each]
        return {"each": each, "made": self._made, "is_first": self._is_first}

    def _start(self, each: list[Mapping[str, Any]] | None) -> Iterator[Any]:
        loader = self._loader
        if self._folder is not None:
            _remove(self._folder, os.getpid())
        self._folder = Path(tempfile.mkdtemp(prefix="hydroslurm-workers-"))
        weakref.finalize(self, _remove, self._folder, os.getpid())
        self._made, self._each, self._is_first = self._state.now(), None, True
        loader._iterator = None  # of workers that write nothing down
        own = loader.worker_init_fn
        loader.worker_init_fn = _WorkerNotes(own, loader.collate_fn, self._folder, each)
        try:
            return iter(loader)
        finally:
            loader.worker_init_fn = own

    def _read(self, number: int) -> Mapping[str, Any]:
        assert self._folder is not None
        path, give_up_s = _path(self._folder, number), time.monotonic() + _WAIT_S
        while not path.exists():
            if time.monotonic() > give_up_s:
                raise UnsavableState(
                    f"worker {number} of the loader has not begun the epoch for {_WAIT_S:g} s, so "
                    "that its state cannot be saved"
                )
            time.sleep(_POLL_S)
        found = torch.load(path, weights_only=True)
        notes: Mapping[str, Any] = decode(found["tree"], found["tensors"])
        return notes


class _WorkerNotes:
    """In a worker, as its init function: puts back what it had, and writes that down at the
    beginning of each epoch. Can be pickled when its parts can."""

    def __init__(
        self,
        then: Callable[[int], None] | None,
        collate_fn: Any,
        folder: Path,
        each: list[Mapping[str, Any]] | None,
    ) -> None:
        self.then, self.collate_fn, self.folder, self.each = then, collate_fn, folder, each

    def __call__(self, worker: int) -> None:
        if self.then is not None:
            self.then(worker)
        info: Any = get_worker_info()
        census = Census(
            {"dataset": info.dataset, "collate_fn": self.collate_fn}, all_generators=True
        )
        census.note()
        if self.each is not None:
            rng.restore(self.each[worker]["rng"])
            census.restore(self.each[worker]["objects"])
        kind: Any = torch_dataloader._DatasetKind
        create = kind.create_fetcher

        def create_fetcher(*args: Any) -> Any:  # once for each epoch
            self._write(worker, census)
            return create(*args)

        kind.create_fetcher = staticmethod(create_fetcher)

    def _write(self, worker: int, census: Census) -> None:
        unkept = [str(one) for one in census.unkept()]
        notes = {"rng": rng.capture(), "objects": census.state(), "unkept": unkept}
        tree, tensors = encode(notes, prefix="worker")
        path = _path(self.folder, worker)
        with contextlib.suppress(FileNotFoundError):  # the rank has gone, and its folder
            new = path.with_suffix(".new")
            torch.save({"tree": tree, "tensors": tensors}, new)
            new.replace(path)


def _say(lost: Iterable[str]) -> None:
    for text in lost:
        warnings.warn(f"hydroslurm: {text}", RuntimeWarning, stacklevel=4)


def _path(folder: Path, worker: int) -> Path:
    return folder / f"worker-{worker}"


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not from a child that was forked
        shutil.rmtree(folder, ignore_errors=True)

"""The log of an elastic run's steps since its last checkpoints, by which a replay is checked.

With ``recovery: log_replay`` the first rank appends a line for each step: its place in the data,
the ranks, the learning rates, and digests of the weights and of the random numbers. If all members
are lost, the run starts at its checkpoint and trains these steps again. With ``summation:
fixed_order`` they depend on nothing but the checkpoint and the data, so that any number of ranks
arrives at the same bits; the log says whether it did, and if not, at which step.

    elastic/steps.jsonl       one line per step, some 300 bytes
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from hydroslurm.core.files import read_end, write_atomically
from hydroslurm.core.journal import append_entry, entries_of
from hydroslurm.core.trust import check_trusted
from hydroslurm.elastic.engine import InPlaceEngine

Answer = TypeVar("Answer")

_BYTES = 256 << 20
_COMPARED = ("epoch", "consumed", "samples", "lr", "weights", "rng")
"""What a replay must have again; ranks and generation may be others."""


@dataclass(frozen=True)
class Replayed:
    """How the replay of a span of steps has gone.

    Attributes:
        first, last: the steps that were trained again, counted from 1.
        differs: what was other than logged at ``last``; empty: all is as it was.
    """

    first: int
    last: int
    differs: tuple[str, ...] = ()


class StepLog:
    """Of the rank that is the first of its generation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[int, dict[str, Any]] = {}
        self._first = 0
        self._last = -1
        self._committed = 0

    def begin(self, step: int) -> range:
        """The run goes on behind this step.

        Returns:
            The steps that the log has behind it, which are to be trained again.
        """
        self._lines = _read(self._path)
        behind = [one for one in self._lines if one > step]
        self._first, self._last = step + 1, max(behind, default=step)
        self._committed = 0
        return range(self._first, self._last + 1)

    def completed(self, entry: Mapping[str, Any]) -> Replayed | None:
        """A step is complete; ``entry`` has its number as ``step``.

        Returns:
            Once the last step of the replay is reached, or one that differs from the log, which is
            written anew from there on.
        """
        step = int(entry["step"])
        if step > self._last:
            self._append(entry)
            return None
        logged = self._lines.get(step)
        if logged is None:
            self._lines[step] = dict(entry)
        else:
            now = json.loads(json.dumps(dict(entry)))
            differs = tuple(one for one in _COMPARED if logged.get(one) != now.get(one))
            if differs:
                self._lines = {number: one for number, one in self._lines.items() if number < step}
                self._lines[step] = now
                self._write()
                self._last = step - 1
                return Replayed(self._first, step, differs)
        return Replayed(self._first, step) if step == self._last else None

    def committed(self, step: int) -> None:
        """A checkpoint of this step is on disk. What lies before the one before is forgotten."""
        if step <= self._committed:
            return
        before, self._committed = self._committed, step
        self._lines = {number: one for number, one in self._lines.items() if number > before}
        self._write()

    def _append(self, entry: Mapping[str, Any]) -> None:
        self._lines[int(entry["step"])] = dict(entry)
        append_entry(self._path, entry, durable=False)

    def _write(self) -> None:
        lines = [json.dumps(one) + "\n" for _, one in sorted(self._lines.items())]
        write_atomically(self._path, "".join(lines).encode())


class CheckedSteps:
    """Logs the steps of the first rank, and tells a person how a replay has gone."""

    def __init__(
        self,
        engine: InPlaceEngine,
        *,
        tell: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._tell, self._warn = tell, warn
        self._log = StepLog(engine.folder.steps_jsonl)
        self._optimizers: list[Optimizer] = []
        self._has_failed = False

    def watch(self, optimizer: Optimizer) -> None:
        """Log the learning rates of this one, too."""
        self._optimizers.append(optimizer)

    def begin(self, step: int) -> None:
        """This rank is the first from here on."""
        again = self._written(lambda: self._log.begin(step))
        if again:
            self._tell(
                f"steps {again.start} to {again.stop - 1} were trained before and are in no "
                "checkpoint; they are trained again, and compared with their log"
            )

    def completed(self, step: int, epoch: int, *, own: Mapping[str, Any], samples: int) -> None:
        """A step is complete; ``own``: where the rank is now, as it would be saved."""
        if self._has_failed:
            return
        parameters = [one for each in self._engine.modules for one in each.parameters()]
        groups = [group for one in self._optimizers for group in one.param_groups]
        entry = {
            "step": step,
            "epoch": epoch,
            "consumed": own.get("data", {}).get("sampler", {}).get("consumed"),
            "samples": samples,
            "generation": self._engine.member.generation,
            "ranks": dist.get_world_size(),
            "lr": [float(group["lr"]) for group in groups],
            "weights": digest_of_weights(parameters),
            "rng": digest_of_rng(own["rng"]),
        }
        replayed = self._written(lambda: self._log.completed(entry))
        if replayed is not None and replayed.differs:
            self._warn(
                f"the replay differs from the log at step {replayed.last}, in "
                f"{', '.join(replayed.differs)}: the script, its data or libraries are others, or "
                "its kernels are not deterministic. The training goes on with what it has now"
            )
        elif replayed is not None:
            self._tell(f"steps {replayed.first} to {replayed.last} are bit for bit what they were")

    def committed(self, step: int) -> None:
        """A checkpoint of this step is on disk."""
        self._written(lambda: self._log.committed(step))

    def _written(self, write: Callable[[], Answer]) -> Answer | None:
        """The training does not end for a log that cannot be written: a full disk, a quota."""
        if self._has_failed:
            return None
        try:
            return write()
        except OSError as error:
            self._has_failed = True
            self._warn(
                f"the log of the steps cannot be written ({error}): from here on this attempt "
                "logs none, and a replay of them would not be compared. The training goes on"
            )
            return None


def digest_of_weights(tensors: Iterable[torch.Tensor]) -> str:
    """A digest of their bits: the sum of each as integers, computed where they are. It reads the
    weights once and waits for the device. Whatever changes one weight changes it; that two changes
    make up for each other, or two weights change places, it does not see."""
    sums = [
        one.detach().reshape(-1).view(_INTEGERS[one.element_size()]).sum(dtype=torch.int64)
        for one in tensors
        if one.numel()
    ]
    numbers = torch.stack([one.cpu() for one in sums]) if sums else torch.zeros(1)
    return hashlib.blake2b(numbers.numpy().tobytes(), digest_size=16).hexdigest()


def digest_of_rng(state: Mapping[str, Any]) -> str:
    """A digest of what :func:`hydroslurm.checkpoint.rng.capture` saw on the CPU."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (state["torch"], state["python"]["state"], state["numpy"]["key"]):
        digest.update(part.numpy().tobytes())
    digest.update(repr((state["python"]["gauss"], state["numpy"]["pos"])).encode())
    return digest.hexdigest()


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _read(path: Path) -> dict[int, dict[str, Any]]:
    """The lines by their steps; one that is torn is passed over.

    Raises:
        UntrustedFile: others could have written it.
    """
    if not path.exists():
        return {}
    check_trusted(path, what="the log of an elastic run's steps", shared=True)
    entries = entries_of(read_end(path, most_bytes=_BYTES).splitlines())
    return {entry["step"]: entry for entry in entries if isinstance(entry.get("step"), int)}

"""A generation's process group from torchft (https://github.com/meta-pytorch/torchft, the extra
``torchft``): its reconfigurable groups, whose errors and time-outs leave the process alive.

Of torchft only these are used. Its Manager and lighthouse would decide a second time, and otherwise
than the coordinator of this run, who trains together and what a step was (0.2.0):

- replica groups may disagree on whether a step counts (manager.py, should_commit: "Different
  replica groups may return different values"), and batches of the one that heals are dropped
  (data.py: "This sampler is inherently lossy"); here every sample comes once;
- the gradient is divided by the number of replicas (manager.py, allreduce); here by samples;
- nothing authenticates anybody: the Manager binds ``[::]`` (manager.py, __init__), its state is
  served by HTTP on all addresses and unpickled where it arrives (checkpointing/http_transport.py,
  ``weights_only=False``), and ``ProcessGroup.configure`` takes the address of an open TCPStore.

So ``configure`` is not called either: what it does, to drop the old connections and make new ones
by a store, is done here with the store of the coordinator, by the same two methods.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hydroslurm.elastic.directives import Form
from hydroslurm.elastic.group import TIMEOUT_S
from hydroslurm.elastic.kept_group import KeptGroup

NCCL_TIMEOUT_S = 60.0
"""torchft's default. It keeps an entry per operation for so long, and aborts the group behind it
(process_group.py, ProcessGroupNCCL), so that it must not be long. A rank that hangs is given up by
the coordinator before."""


class TorchftGroup(KeptGroup):
    """By torchft's process groups, over gloo or NCCL."""

    engine = "torchft"

    def _begin(self, form: Form) -> None:
        dist.init_process_group(
            _registered(self._backend),
            store=self._store,
            rank=form.rank,
            world_size=form.world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )

    def _connect(self, form: Form) -> None:
        kept: Any = self._kept
        kept.connect(form.rank, form.world_size)


def why_not_torchft(backend: str) -> str:
    """Why torchft's groups are not to be had here; "" if they are."""
    if importlib.util.find_spec("torchft") is None:
        return "torchft is not installed: pip install 'hydroslurm[torchft]'"
    if (version := importlib.metadata.version("torchft")).split(".")[:2] != ["0", "2"]:
        return f"torchft {version} is installed, and 0.2 is what this is made for"
    if backend not in ("gloo", "nccl"):
        return (
            f"torchft has groups of gloo or of NCCL, and this one is {backend}: "
            'init_process_group("nccl")'
        )
    return ""


@functools.cache
def _registered(backend: str) -> str:
    """A name for ``init_process_group`` that gives torchft's group; it has no such name itself."""
    name = f"torchft-{backend}"

    def create(store: Store, rank: int, world_size: int, _: timedelta) -> dist.ProcessGroup:
        made = _kind(backend)(store, timeout=_timeout(backend))
        made.connect(rank, world_size)
        return made  # type: ignore[no-any-return]

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    dist.Backend.register_backend(name, create, devices=devices)
    return name


def _timeout(backend: str) -> timedelta:
    return timedelta(seconds=NCCL_TIMEOUT_S if backend == "nccl" else TIMEOUT_S)


def _kind(backend: str) -> Any:
    """A class of torchft's whose objects meet by a store of ours, and know their rank."""
    from torchft import process_group

    base: Any = {
        "gloo": process_group.ProcessGroupGloo,
        "nccl": process_group.ProcessGroupNCCL,
    }[backend]

    class Connected(base):  # type: ignore[misc]
        def __init__(self, store: Store, *, timeout: timedelta) -> None:
            super().__init__(timeout=timeout)
            self._store = (
                store  # torch puts its prefix before each key, and all ranks have the same
            )

        def connect(self, rank: int, world_size: int) -> None:
            self.abort(errored=False)
            self._rank = rank
            self._pg = self._create_pg(self._store, rank, world_size)

        def rank(self) -> int:  # the base class was made as 0 of 1
            return int(self._rank)

        @property
        def parent(self) -> Any:
            """torchft asserts that there is a group; after an abort of its own there is none, and
            then the step does not count, which is no mistake of this program."""
            if self._pg is None:
                raise RuntimeError("torchft has aborted this process group")
            return self._pg

    Connected.__name__ = Connected.__qualname__ = base.__name__
    return Connected

"""The process groups of an elastic run, rebuilt between two steps, in the same processes.

The default group of torch.distributed is destroyed and rebuilt over the members of the new
generation, so that ``dist.get_rank()`` and all users of the default group are right. The ranks meet
through a store over their authenticated connections to the coordinator: torch's own store, with
its open port, is not used.

DistributedDataParallel stays the user's object. It runs on a group of this process alone, so its
own collectives wait for nobody; a communication hook sums the gradients over the generation
(:mod:`hydroslurm.elastic.reduction`). All ranks rebuild its buckets at each change: the order in a
bucket follows the backward that filled it first, and ranks with other buckets would add gradients
of other weights. (torch: Reducer::rebuild_buckets, and
DistributedDataParallel._update_process_group, which keeps the old buckets.)
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from hydroslurm.core.threads import thread
from hydroslurm.elastic.member import STORE_S, Member
from hydroslurm.elastic.roster import MEETING_S, Form
from hydroslurm.elastic.sharded import Shards
from hydroslurm.errors import CoordinatorLost, HydroslurmError, RanksError, UsageError

TIMEOUT_S = 1800.0
"""Timeout of collectives. Connections reveal a lost rank, the coordinator a hanging one; this is
for what both miss."""


class CoordinatorStore(Store):
    """torch's store, kept by the run's coordinator.

    Attributes:
        is_meeting: the generation's groups are being made, rather than one of the script's.
        is_over: the generation is over; later requests fail.
        published: values of those groups' ranks, their addresses among them.
    """

    def __init__(self, member: Member, generation: int) -> None:
        super().__init__()
        self.is_meeting, self.is_over = True, False
        self.published: list[bytes] = []
        self._member = member
        self._generation = generation
        self._timeout_s = STORE_S
        self._groups: set[str] = set()

    def set(self, key: str, value: bytes | str) -> None:
        data = value if isinstance(value, bytes) else str(value).encode()
        if self.is_meeting:
            self._groups.add(_group_of(key))
        self._note(key, data)
        self._member.set_value(self._place(key), data)

    def get(self, key: str) -> bytes:
        timeout_s = min(self._timeout_s, self._most_s)
        (value,) = self._member.get_values([self._place(key)], timeout_s=timeout_s)
        self._note(key, value)
        return value

    def _note(self, key: str, data: bytes) -> None:
        if _group_of(key) in self._groups:  # also later: gloo may connect at its first send
            self.published.append(data)

    def add(self, key: str, amount: int) -> int:
        return self._member.add_value(self._place(key), amount)

    @property
    def _most_s(self) -> float:
        return MEETING_S if self.is_meeting else STORE_S

    def _place(self, key: str) -> str:
        if self.is_over:
            raise CoordinatorLost(f"generation {self._generation} is over")
        return f"{self._generation}/{key}"

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Claim a key: the first caller gets its own value back, all others the first one's.

        Raises:
            ValueError: a value is expected; torch never asks for that.
        """
        if expected:
            raise ValueError(f"compare_set({key!r}) of {expected!r}: only a key without a value")
        if self.add(f"{key}/claims", 1) == 1:
            self.set(key, desired)
        return self.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        # gloo passes its collectives' timeout, longer than any rank takes to listen
        timeout_s = min(timeout.total_seconds() if timeout else self._timeout_s, self._most_s)
        self._member.get_values([self._place(key) for key in keys], timeout_s=timeout_s)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def clone(self) -> CoordinatorStore:
        return self


@contextlib.contextmanager
def meeting() -> Iterator[None]:
    """Wrap the collectives of a change: their errors are other ranks' failures. All other errors
    in here are this rank's own, and end it.

    Raises:
        RanksError: a collective has failed.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, (HydroslurmError, UsageError)):
            raise
        raise RanksError(str(error)) from error


class GenerationGroup:
    """This process's default process group, one generation after another."""

    def __init__(self, member: Member, *, backend: str, shards: Shards | None = None) -> None:
        """
        Args:
            backend: as for ``init_process_group``.
            shards: of a model that each member shards.
        """
        self._member = member
        self._backend = backend
        self._shards = shards
        self._store: CoordinatorStore | None = None  # it works only while its Python half lives
        self._published: list[bytes] = []
        self._hooks: tuple[Any, Any] | None = None
        self.replicas: dist.ProcessGroup | None = None
        """Ranks with the same shard; None without shards, or if there is no other."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The current group; None between two generations."""
        return dist.group.WORLD if dist.is_initialized() else None

    def form(self, form: Form) -> None:
        """Meet the other ranks.

        Raises:
            RanksError: they did not all come.
        """
        self._published = []
        if self._store is not None:
            self._store.is_over = True
        self._store = store = CoordinatorStore(self._member, form.generation)
        try:
            with _interruptible_gloo(lambda: self._member.broken, store):
                self._meet(form, store)
                if self._shards is not None:
                    self._shards.node_groups.renumber(form.rank - self._member.local_rank)
                    self.replicas = self._shards.replicas(form)
            self._published = store.published
            if self._member.broken:  # an earlier abort() had nothing to shut down
                raise RanksError("it is not to be any more")
        except (RuntimeError, ValueError) as error:
            store.is_over = True
            self.destroy()
            raise RanksError(f"generation {form.generation} could not meet: {error}") from error
        store.is_meeting = False

    def abort(self) -> None:
        """Make collectives fail that wait for a lost or hanging rank; call from any thread.

        NCCL has a call for this. gloo has none that wakes waiters (tried with 2.13: abort() of the
        group and of its backend, and shutdown(), return and change nothing). So shut its
        connections down, which gloo takes for the peer's death. These are the connections with an
        end at which a rank of these groups listens; no others have one.
        """
        with contextlib.suppress(Exception):
            if "nccl" in self._backend:
                for group in filter(None, (self.replicas, self.group)):
                    group.abort()
        published = b"".join(self._published)
        for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
                        # not a listener: gloo treats its shutdown as a bug
                        ends = (duplicate.getpeername(), duplicate.getsockname())
                        if any(_packed(duplicate.family, end) in published for end in ends):
                            duplicate.shutdown(socket.SHUT_RDWR)

    def destroy(self) -> None:
        """End the group, if there is one."""
        self._published = []
        self.replicas = None
        if self._shards is not None:
            self._shards.node_groups.end_others()
        elif dist.is_initialized():
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group()
        else:
            # torch also counts groups that could not be made; the count names a group and
            # begins its store keys, so a newcomer would wait at other keys
            distributed_c10d._world.group_count = 0
        # torch adds a "[rank0]: " prefix to tracebacks for each group, and never removes it
        if self._hooks is not None and sys.excepthook is self._hooks[1]:
            sys.excepthook = self._hooks[0]
        self._hooks = None

    def close(self) -> None:
        """End the group; restore the script's own if its model uses that."""
        self.destroy()
        if self._shards is not None:
            self._shards.node_groups.give_back()

    def _meet(self, form: Form, store: Store) -> None:
        self.destroy()
        before = sys.excepthook
        dist.init_process_group(
            self._backend,
            store=store,
            rank=form.rank,
            world_size=form.world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        self._hooks = (before, sys.excepthook)


@contextlib.contextmanager
def _interruptible_gloo(is_over: Callable[[], bool], store: Store) -> Iterator[None]:
    """Let gloo's groups that are made inside give up when their generation is over.

    gloo waits five times its collectives' timeout for a peer that has published its address and
    died since, and nothing wakes it (2.13: Pair::waitUntilConnected). So make each group in a
    thread, and abandon that; torch does not know its group yet.
    """
    init = dist.ProcessGroupGloo.__init__

    def init_in_thread(*arguments: Any, **options: Any) -> None:
        errors: list[Exception] = []

        def run(_store: Store) -> None:  # keeps the store alive while the group may use it
            try:
                init(*arguments, **options)
            except Exception as error:
                errors.append(error)

        making = thread(run, store, name="hydroslurm-meeting")
        making.start()
        while making.is_alive():
            making.join(_LOOK_S)
            if making.is_alive() and is_over():
                raise RanksError("a rank that was to come is gone")
        if errors:
            raise errors[0]

    dist.ProcessGroupGloo.__init__ = init_in_thread  # type: ignore[method-assign]
    try:
        yield
    finally:
        dist.ProcessGroupGloo.__init__ = init  # type: ignore[method-assign]


_LOOK_S = 0.1


def alone() -> dist.ProcessGroup:
    """Return a group of this process, unknown to all others."""
    store = HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    backend = dist.ProcessGroupGloo(store, 0, 1, timeout=timedelta(seconds=TIMEOUT_S))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    for kind in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        group._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def parallel_modules(things: Iterable[Any]) -> list[DistributedDataParallel]:
    """Return every DistributedDataParallel in or around these objects.

    Raises:
        UsageError: one is sharded by FSDP1.
    """
    found: list[DistributedDataParallel] = []
    for thing in things:
        for module in thing.modules() if isinstance(thing, nn.Module) else ():
            if isinstance(module, DistributedDataParallel) and module not in found:
                found.append(module)
            if "FullyShardedDataParallel" in {kind.__name__ for kind in type(module).__mro__}:
                raise UsageError(
                    f"{type(module).__name__} divides its weights over the ranks, and an elastic "
                    "run that changes its size in place has to find them whole on each. Say "
                    "`elastic: {engine: restart}` in the job spec, which saves and starts ranks "
                    "again, or use DistributedDataParallel"
                )
    return found


def rebuild(module: DistributedDataParallel, hook: Callable[..., Any], state: Any) -> None:
    """Give DDP its initial buckets, on a group of one, with a hook for the sums.

    The object stays the user's; its contents become those of a new one around the same module.
    """
    local: dict[str, Any] = {} if module.broadcast_buffers else {"broadcast_buffers": False}
    fresh = DistributedDataParallel(
        module.module,
        device_ids=module.device_ids or None,
        output_device=module.output_device,
        dim=module.dim,
        process_group=alone(),
        bucket_cap_mb=module.bucket_bytes_cap / (1 << 20),
        find_unused_parameters=module.find_unused_parameters,
        gradient_as_bucket_view=module.gradient_as_bucket_view,
        static_graph=module.static_graph,
        **local,
    )
    kept = {name: module.__dict__[name] for name in _OF_THE_USER if name in module.__dict__}
    module.__dict__.clear()
    module.__dict__.update(fresh.__dict__)
    module.__dict__.update(kept)
    module.register_comm_hook(state, hook)


_OF_THE_USER = (
    "training",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "require_backward_grad_sync",
)
"""Attributes of the wrapper that a user may have set."""


def backend_of_script() -> str:
    """Return the script's backend as ``init_process_group`` takes it; without one gloo, or NCCL
    where the weights are on a GPU."""
    if dist.is_initialized():
        backend = str(dist.get_backend())
        return backend if backend in ("gloo", "nccl", "nccl2") else str(dist.get_backend_config())
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _group_of(key: str) -> str:
    """Return the part of a key for one group and device: ``0//cpu`` of ``0//cpu//0/3``."""
    return key.rpartition("//")[0]


def _packed(family: int, address: Any) -> bytes:
    """Return the start of a ``struct sockaddr``, which gloo publishes as its address.

    Raises:
        OSError: the family is not IP.
    """
    if family not in (socket.AF_INET, socket.AF_INET6):
        raise OSError(f"no address of IP: {address!r}")
    host, port = address[:2]
    flow = b"" if family == socket.AF_INET else bytes(4)
    number = socket.inet_pton(family, host.partition("%")[0])
    return struct.pack("=H", family) + struct.pack("!H", port) + flow + number

"""What a script uses: DistributedDataParallel with gradients that are reduced on the host, and the
same as a communication hook."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn import parallel

from hydroslurm.coordination import collectives
from hydroslurm.errors import HydroslurmError, ReductionFailed, UsageError
from hydroslurm.parallel import node_memory, nodes
from hydroslurm.parallel.reduction import Arithmetic, CudaCopies, Job, Reduction

PIECE_ELEMENTS = 1 << 20
SLOTS = 4
_SETUP_S = 300.0
_TOLD_BYTES = 4096
"""What a rank tells the others while they set up, as JSON."""

Hook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


class DistributedDataParallel(parallel.DistributedDataParallel):
    """PyTorch's, with gradients that are reduced on the host: within each node through shared
    memory, then between the nodes by one rank of each, while the backward goes on.

        model = hydroslurm.parallel.DistributedDataParallel(model)

    Every rank gets the same gradients, bit for bit, and they depend neither on the buckets nor on
    the processor.

    Args:
        module, options: as for PyTorch's.
        accumulate, wire: as for :func:`host_reduce_hook`.
    """

    def __init__(
        self,
        module: nn.Module,
        *options: Any,
        accumulate: torch.dtype | None = None,
        wire: torch.dtype | None = None,
        **more: Any,
    ) -> None:
        super().__init__(module, *options, **more)
        hook = host_reduce_hook(self.process_group, accumulate=accumulate, wire=wire)
        self.register_comm_hook(None, hook)


def host_reduce_hook(
    process_group: dist.ProcessGroup | None = None,
    *,
    accumulate: torch.dtype | None = None,
    wire: torch.dtype | None = None,
    piece_elements: int = PIECE_ELEMENTS,
    environ: Mapping[str, str] | None = None,
) -> Hook:
    """A communication hook for PyTorch's DistributedDataParallel, one for each model:

        model.register_comm_hook(None, hydroslurm.parallel.host_reduce_hook())

    A collective: all ranks of the group call it. Those of one machine are on one node, unless
    torchrun's GROUP_RANK or srun's SLURM_NODEID tells them apart.

    Args:
        process_group: that of the model; default: all ranks.
        accumulate: the type of sums, ``torch.float32`` or ``torch.float64``. Default: float32, and
            float64 for gradients of float64.
        wire: the type of what travels between nodes, such as ``torch.bfloat16``, which halves it
            for gradients of float32. Default: that of the gradients.
        piece_elements: how many elements are under way as one; the same on all ranks.
        environ: instead of ``os.environ``.

    Raises:
        UsageError: a type that cannot be, or ranks that do not agree on them.
        ReductionFailed: the ranks of a node could not be given shared memory, or the nodes not be
            connected. All ranks raise it.
    """
    _check(accumulate, wire, piece_elements)
    group = process_group or distributed_c10d._get_default_group()
    arithmetic = Arithmetic(accumulate, wire, piece_elements)
    reducer = _Reducer(group, arithmetic, os.environ if environ is None else environ)

    def host_reduce(_state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        return reducer.reduce(bucket.buffer())

    host_reduce.__annotations__ = {}  # DDP compares them with its own, and does not read texts
    return host_reduce


def _check(accumulate: Any, wire: Any, piece_elements: int) -> None:
    if accumulate not in (None, torch.float32, torch.float64):
        raise UsageError(
            f"accumulate={accumulate}; wanted torch.float32 or torch.float64: sums in 16 bits "
            "would lose small gradients"
        )
    if wire is not None and wire not in nodes.TYPES:
        kinds = ", ".join(str(kind) for kind in nodes.TYPES)
        raise UsageError(f"wire={wire}; wanted one of {kinds}")
    if isinstance(piece_elements, bool) or not 0 < piece_elements <= 1 << 28:
        raise UsageError(f"piece_elements={piece_elements}; wanted 1 to {1 << 28}")


class _Reducer:
    """One model's reduction; ends with its last reference."""

    def __init__(
        self, group: dist.ProcessGroup, arithmetic: Arithmetic, environ: Mapping[str, str]
    ) -> None:
        self._arithmetic = arithmetic
        self._copies: dict[torch.device, CudaCopies] = {}
        self._reduction: Reduction | None = None
        self.key = next(_keys)
        if dist.get_world_size(group) > 1:
            self._set_up(group, environ)
        _reducers[self.key] = self

    def _set_up(self, group: dist.ProcessGroup, environ: Mapping[str, str]) -> None:
        rank = dist.get_rank(group)
        told = _gather([nodes.here(environ), str(self._arithmetic), secrets.token_hex(16)], group)
        mine = nodes.group([str(name) for name, _, _ in told], rank)
        if len(different := sorted({str(one) for _, one, _ in told})) > 1:
            raise UsageError(
                f"the ranks do not agree: {', '.join(different)}. "
                "Give all ranks the same accumulate, wire and piece_elements"
            )
        token, timeout = str(told[0][2]), _timeout_of(group)
        self._memory = _share(mine, token, self._arithmetic, group)
        network, problem = None, ""
        if mine.local_rank == 0 and len(mine.members) > 1:
            try:
                store = distributed_c10d._get_default_store()
                network = nodes.Network(
                    self._memory,
                    store=distributed_c10d.PrefixStore(f"hydroslurm/{token}", store),
                    node=mine.node,
                    nodes=len(mine.members),
                    timeout=timeout,
                )
            except RuntimeError as error:
                problem = f"rank {rank} cannot reach the other nodes: {error}"
        _raise_together(problem, group)
        reduction = self._reduction = Reduction(
            *(self._memory, mine, network),
            arithmetic=self._arithmetic,
            timeout_s=timeout.total_seconds(),
            exempt=_exempt,
        )
        key = f"host_reduce/{token[:8]}"
        members = tuple(dist.get_process_group_ranks(group))
        collectives.add_group(
            key, members, issued=lambda: reduction.issued, in_flight=lambda: reduction.in_flight
        )

        def end() -> None:
            collectives.remove_group(key)
            reduction.close()

        weakref.finalize(self, end)

    def reduce(self, bucket: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """The average over all ranks, in place; the future has the bucket.

        Raises:
            UsageError: gradients that this cannot add.
            ReductionFailed: an earlier reduction failed.
        """
        if bucket.layout is not torch.strided or bucket.dtype not in nodes.TYPES:
            raise UsageError(
                f"gradients of {bucket.dtype} ({bucket.layout}) cannot be reduced on the host; "
                "wanted dense ones of float32, float64, bfloat16 or float16. Sparse gradients "
                "(Embedding(sparse=True)) need PyTorch's own DistributedDataParallel"
            )
        device: list[int | str | torch.device] = [bucket.device] if bucket.is_cuda else []
        done: torch.futures.Future[Any] = torch.futures.Future(devices=device)
        if self._reduction is None:
            done.set_result(bucket)
            return done

        def result(done: torch.futures.Future[Any]) -> torch.Tensor:
            if failure := done.value():
                raise ReductionFailed(failure)
            return bucket

        answer = done.then(result)
        self._finish = done.set_result
        # an operator of torch's, for a pause holds a rank there: see collectives.add_group()
        torch.ops.c10d.hydroslurm_host_reduce(bucket, self.key)
        return answer

    def submit(self, bucket: torch.Tensor) -> None:
        """What the operator does."""
        assert self._reduction is not None
        job = Job(bucket, self._finish)
        if bucket.is_cuda:
            if bucket.device not in self._copies:
                self._copies[bucket.device] = CudaCopies(self._memory, bucket.device)
            job.copies = self._copies[bucket.device]
            job.begun = job.copies.event()
        self._reduction.submit(job)


_keys = itertools.count()
_reducers: weakref.WeakValueDictionary[int, _Reducer] = weakref.WeakValueDictionary()
_operators = torch.library.Library("c10d", "FRAGMENT")  # type: ignore[no-untyped-call]
_operators.define(  # type: ignore[no-untyped-call]
    "hydroslurm_host_reduce(Tensor(a!) gradients, int reducer) -> ()"
)
_operators.impl(  # type: ignore[no-untyped-call]
    "hydroslurm_host_reduce",
    lambda bucket, key: _reducers[key].submit(bucket),
    "CompositeExplicitAutograd",
)


def _gather(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """What each rank says. As JSON: all_gather_object() would unpickle what the others send."""
    text = json.dumps(mine).encode().ljust(_TOLD_BYTES)
    device, _ = _backend_of(group)
    sent = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    told = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(told, sent, group=group)
    return [json.loads(bytes(one.tolist())) for one in told]


def _backend_of(group: dist.ProcessGroup) -> tuple[torch.device, Any]:
    """Where the group's collectives work, and what does them."""
    with contextlib.suppress(RuntimeError):
        return torch.device("cpu"), group._get_backend(torch.device("cpu"))
    device = torch.device("cuda", torch.cuda.current_device())
    return device, group._get_backend(device)


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of this group may take."""
    with contextlib.suppress(RuntimeError, AttributeError):
        timeout = _backend_of(group)[1].options._timeout
        if isinstance(timeout, timedelta):
            return timeout
    return timedelta(minutes=30)


def _raise_together(problem: str, group: dist.ProcessGroup) -> None:
    """All ranks learn of the problem of any of them.

    Raises:
        ReductionFailed: there is one.
    """
    if found := [one for one in _gather(problem[:500], group) if one]:
        raise ReductionFailed(str(found[0]))


def _share(
    mine: nodes.Nodes, token: str, arithmetic: Arithmetic, group: dist.ProcessGroup
) -> node_memory.NodeMemory:
    """Give the ranks of this node their memory."""
    ranks = len(mine.mine)
    # the exchange rounds a piece up to a multiple of the nodes
    room = (arithmetic.piece_elements + len(mine.members)) * torch.float64.itemsize
    layout = node_memory.Layout(ranks=ranks, slots=SLOTS, area_bytes=-(-room // 4096) * 4096)
    name, problem, found = f"hydroslurm-{token}-{mine.node}", "", None
    with contextlib.ExitStack() as stack:
        listener = None
        if ranks > node_memory.MOST_LOCAL_RANKS:
            problem = f"{ranks} ranks on one node; at most {node_memory.MOST_LOCAL_RANKS} can share"
        elif mine.local_rank == 0:
            try:
                listener = stack.enter_context(node_memory.listen(name, layout))
            except OSError as error:
                problem = f"no socket for the node's memory: {error}"
        _raise_together(problem, group)
        try:
            if listener is not None:
                found = node_memory.offer(listener, layout, timeout_s=_SETUP_S)
            else:
                found = node_memory.take(name, layout, mine.local_rank, timeout_s=_SETUP_S)
        except (HydroslurmError, OSError) as error:
            problem = str(error)
        _raise_together(problem, group)
    assert found is not None
    return found


def _exempt() -> AbstractContextManager[None]:
    """Where a gate is installed by now: what is under way is finished during a pause."""
    install = sys.modules.get("hydroslurm.runtime.install")
    if install is not None and install.is_installed():
        with contextlib.suppress(HydroslurmError):  # uninstalled at this moment
            return install.controller().exempt()  # type: ignore[no-any-return]
    return contextlib.nullcontext()

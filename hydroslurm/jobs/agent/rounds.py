"""What the nodes of one round of torch's rendezvous settle among themselves through its store.

Their order is that of Slurm's tasks, so that rank 0 is the first task's. Torch's dynamic rendezvous
(c10d, etcd-v2) sorts the nodes by their addresses as texts, and by process ids where several share
one; etcd counts them as they come. Rank 0, its output and its exit status, would be another
replica's in each start of a job, and MASTER_ADDR the name that a machine has for itself, which the
others need not know.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.utils import distributed

from hydroslurm.jobs.agent.defaults import Rendezvous

_get_free_port: Callable[[], int] = distributed.get_free_port


def in_order_of_tasks(handler: Any, where: Rendezvous, *, local_addr: str | None) -> None:
    """Have torch's rendezvous handler number the nodes of each round anew, in place.

    Args:
        handler: one whose nodes are all tasks of this job step.
        local_addr: torchrun's option; None: nobody has named an address of this node.
    """
    torchs = handler.next_rendezvous
    if local_addr is None:
        # what all have met at is known to lead to the first task
        met_at = where.endpoint.rpartition(":")[0]
        local_addr = met_at if where.rank == 0 else socket.getfqdn()

    def next_rendezvous() -> RendezvousInfo:
        met = torchs()
        # a store of this round alone
        store = PrefixStore("hydroslurm/order", met.store)
        store.set(f"task/{met.rank}", str(where.rank))
        tasks = store.multi_get([f"task/{number}" for number in range(met.world_size)])
        rank = sorted(map(int, tasks)).index(where.rank)
        if handler.use_agent_store:  # that of torch's first node serves the workers, too
            return RendezvousInfo(met.store, rank, met.world_size, met.bootstrap_store_info)
        if rank == 0:
            store.set("master", f"{local_addr}:{_get_free_port()}")
        address, _, port = store.get("master").decode().rpartition(":")
        master = RendezvousStoreInfo(address, int(port))
        return RendezvousInfo(met.store, rank, met.world_size, master)

    handler.next_rendezvous = next_rendezvous


def life_of(worker_group: Any) -> str:
    """One word for all nodes of this round: the first writes it, the others read it."""
    store = worker_group.store
    if worker_group.group_rank == 0:
        store.set("hydroslurm/life", uuid.uuid4().hex)
    return str(store.get("hydroslurm/life").decode())

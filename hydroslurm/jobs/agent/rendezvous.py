"""What torchrun is told when the command line does not say where the nodes meet. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from hydroslurm.coordination.world import World
from hydroslurm.slurm.allocation import Allocation


@dataclass(frozen=True)
class Rendezvous:
    """Where the agents of one job step find each other.

    Attributes:
        nnodes: how many agents there are: one per task of the job step.
        endpoint: HOST:PORT of torch's store.
        run_id: different in each attempt, so that no agent of the last one is met.
        rank: of this agent; the first has the store.
    """

    nnodes: int
    endpoint: str
    run_id: str
    rank: int


def agents(environ: Mapping[str, str]) -> World | None:
    """The tasks of this job step, each an agent; None outside of one, and for a single task.

    Raises:
        UsageError: SLURM_* of a value that Slurm never gives.
    """
    allocation = Allocation.from_environ(environ)
    if allocation is None or allocation.step_id is None or allocation.world_size == 1:
        return None
    # RANK and WORLD_SIZE, should somebody have set them, are not those of the agents
    return World.from_environ({k: v for k, v in environ.items() if k not in ("RANK", "WORLD_SIZE")})


def find_rendezvous(environ: Mapping[str, str], *, key: bytes | None) -> Rendezvous | None:
    """The meeting of this job step's tasks; None where there are no several.

    Args:
        key: that the agents share; the port of the store follows from it.

    Raises:
        UsageError: SLURM_* of a value that Slurm never gives.
    """
    allocation, world = Allocation.from_environ(environ), agents(environ)
    if allocation is None or world is None:
        return None
    return Rendezvous(
        nnodes=allocation.world_size,
        endpoint=f"{world.host}:{world.torch_port(key)}",
        run_id=f"{allocation.job_id}.{allocation.step_id}.{allocation.restart_count}",
        rank=allocation.rank,
    )


def fill_in(
    chosen: argparse.Namespace, where: Rendezvous, *, untouched: argparse.Namespace
) -> bool:
    """Set the rendezvous in torchrun's parsed arguments, unless they say where it is themselves.

    --rdzv-conf says how the agents meet and not where. So do --nnodes, when its greatest number is
    that of the agents that there are, and --rdzv-backend c10d; with `--rdzv-backend static` they
    meet at the same place, each with the node rank of its task. At a server of etcd the job gets a
    name of its own.

    Args:
        untouched: what torchrun's parser gives where nothing is said.

    Returns:
        Whether the place was set.
    """
    if chosen.rdzv_backend.startswith("etcd") and chosen.rdzv_id == untouched.rdzv_id:
        chosen.rdzv_id = where.run_id
        return False
    names = ("standalone", "node_rank", "master_addr", "master_port", "rdzv_endpoint", "rdzv_id")
    if any(getattr(chosen, name, None) != getattr(untouched, name, None) for name in names):
        return False
    says_nodes = chosen.nnodes != untouched.nnodes
    if says_nodes and chosen.nnodes.rpartition(":")[2] != str(where.nnodes):
        return False
    backend = chosen.rdzv_backend
    if backend not in ("c10d", "static"):
        return False
    if not says_nodes:
        chosen.nnodes = str(where.nnodes)
    if backend == "static" and says_nodes and ":" not in chosen.nnodes:
        chosen.node_rank = where.rank
        chosen.master_addr, _, port = where.endpoint.rpartition(":")
        chosen.master_port = int(port)
        return True
    chosen.rdzv_backend = "c10d"
    chosen.rdzv_endpoint = where.endpoint
    chosen.rdzv_id = where.run_id
    if "is_host=" not in chosen.rdzv_conf:
        # which host is meant cannot always be told by its name: several agents may share one
        is_host = f"is_host={int(where.rank == 0)}"
        chosen.rdzv_conf = ",".join(filter(None, (chosen.rdzv_conf, is_host)))
    return True

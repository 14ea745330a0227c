"""Where torchrun's agents meet, and a rendezvous that outlives a suspended job.

Torch's dynamic rendezvous (c10d, etcd-v2) declares a node dead whose last heartbeat is older than
``keep_alive_interval * keep_alive_max_attempt``, 15 s by default. After a longer suspend every node
finds all of them dead, itself included, and forgets them; nobody is told. The workers go on, but
one that fails later is not restarted: its agent waits for others that do not know it, and gives up
after ``join_timeout``.

A larger ``keep_alive_max_attempt`` would hide nodes that are really dead. Instead, time in which
this process was stopped does not count: nobody is given up within ``ALLOWANCE_S`` of a gap in our
own heartbeats. And from SIGTSTP on the store is not asked, because the SIGSTOP that follows would
cut the call in two: a client that wakes up after its time-out takes the late answer for that of its
next call.

A node whose workers have ended waits for the others in an exit barrier. Torch's happens to block
the heartbeats of that node, which is then forgotten, so that a worker that fails elsewhere is
restarted without it; but it waits 300 s for an agent that has died. Ours (:meth:`Peers.wait`)
leaves the round when others wait for the next one, and the kernel says which agents live: each
agent listens at a port, and accepts nothing. Its kernel does, also while the agent is stopped, and
closes the connection when the agent is gone. One connection at a time is enough, to the first node
that is missing. Nothing is read or written.
"""

from __future__ import annotations

import argparse
import contextlib
import select
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hydroslurm.coordination.network import address_towards, configure_socket, listen
from hydroslurm.coordination.world import World
from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.slurm.allocation import Allocation


@dataclass(frozen=True)
class Rendezvous:
    """Where the agents of one job step find each other.

    Attributes:
        nnodes: how many agents there are: one per task of the job step.
        endpoint: HOST:PORT of torch's store.
        run_id: new in each attempt, so that agents of two attempts never meet.
        rank: of this agent; rank 0 hosts the store.
    """

    nnodes: int
    endpoint: str
    run_id: str
    rank: int


def agents(environ: Mapping[str, str]) -> World | None:
    """The tasks of this job step, each an agent; None outside of one, and for a single task.

    Raises:
        UsageError: a SLURM_* variable has a value that Slurm never gives it.
    """
    allocation = Allocation.from_environ(environ)
    if allocation is None or allocation.step_id is None or allocation.world_size == 1:
        return None
    # RANK and WORLD_SIZE, should somebody have set them, are not those of the agents
    return World.from_environ({k: v for k, v in environ.items() if k not in ("RANK", "WORLD_SIZE")})


def find_rendezvous(environ: Mapping[str, str], *, key: bytes | None) -> Rendezvous | None:
    """Where the tasks of this job step meet; None unless there are several.

    Args:
        key: shared by the agents; the port of the store is derived from it.

    Raises:
        UsageError: a SLURM_* variable has a value that Slurm never gives it.
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
    """Set the rendezvous in torchrun's parsed arguments, unless they name one.

    --rdzv-conf says how the agents meet, not where; so do --rdzv-backend c10d and an --nnodes whose
    maximum is the number of agents. torchrun's own default, static, says nothing.

    Args:
        untouched: torchrun's defaults.

    Returns:
        Whether the endpoint was set.
    """
    names = ("standalone", "node_rank", "master_addr", "master_port", "rdzv_endpoint", "rdzv_id")
    if any(getattr(chosen, name, None) != getattr(untouched, name, None) for name in names):
        return False
    says_nodes = chosen.nnodes != untouched.nnodes
    if says_nodes and chosen.nnodes.rpartition(":")[2] != str(where.nnodes):
        return False
    if chosen.rdzv_backend not in ("c10d", untouched.rdzv_backend):
        return False
    if not says_nodes:
        chosen.nnodes = str(where.nnodes)
    chosen.rdzv_backend = "c10d"
    chosen.rdzv_endpoint = where.endpoint
    chosen.rdzv_id = where.run_id
    if "is_host=" not in chosen.rdzv_conf:
        # by its name torch cannot tell which agent is the host: several may share a machine
        is_host = f"is_host={int(where.rank == 0)}"
        chosen.rdzv_conf = ",".join(filter(None, (chosen.rdzv_conf, is_host)))
    return True


ALLOWANCE_S = 30.0
"""After a gap: the nodes of a job do not wake up in the same moment."""
STORE_LOST_S = 30.0
"""How long the store may be unreachable while the workers go on. The agent that hosts it may have
left because its workers did, and ours may be about to find out."""
_POLL_S = 0.05
CONNECT_S = 3.0
"""How long the kernel of another node may take to accept a connection."""


class Peers:
    """The other agents that an agent meets by torch's rendezvous, none of which it gives up for
    being suspended. :meth:`suspend` and torch's calls come in any thread."""

    def __init__(
        self, handler: Any, *, leaving: Callable[[], bool], warn: Callable[[str], None]
    ) -> None:
        """Patch the handler in place.

        Args:
            handler: torch's; one without heartbeats is left as it is.
            leaving: whether the workers of this node are exiting: from then on the other nodes do
                not matter.
            warn: called if this version of torch cannot be patched.
        """
        self._leaving = leaving
        self._is_held = False  # Slurm is about to stop this process: the store must not be asked
        self._handler = handler
        self._met: frozenset[Any] = frozenset()
        self._lost: tuple[AwakeClock, float] | None = None
        self._seen_s = time.monotonic()
        self._allow_until_s = 0.0
        self._interval_s = 5.0
        self._store: Any = None
        self._rank = 0
        self._missing: list[int] = []
        self._listener: socket.socket | None = None
        self._address = ""
        self._connection: socket.socket | None = None
        self._nodes_waiting: Callable[[], int] = handler.num_nodes_waiting
        handler.num_nodes_waiting = self.num_nodes_waiting
        holder = getattr(handler, "_state_holder", None)
        self._is_patched = holder is not None and self._patch(handler, holder)
        if holder is not None and not self._is_patched:
            warn(
                "the rendezvous of this version of torch is unknown: after a suspend longer than "
                "its keep-alive (15 s by default; --rdzv-conf keep_alive_max_attempt=N) failed "
                "workers are not restarted"
            )

    def suspend(self, begins: bool) -> None:
        """Slurm is about to stop this process (True), or has continued it."""
        self._is_held = begins

    def joined(self, group: Any) -> None:
        """This node is in a new round, that of torch's ``WorkerGroup``, whose master address leads
        to the node with rank 0, from all nodes."""
        if self._is_patched:
            self._met = frozenset(self._handler._state_holder.state.participants)
        self._store, self._rank = group.store, group.group_rank or 0
        self._missing = list(range(group.group_world_size or 1))
        if self._listener is None and len(self._missing) > 1:
            with contextlib.suppress(OSError):  # the others then wait for as long as torch does
                self._address = address_towards(group.master_addr or "")
                self._listener = listen(self._address, [0])
        if self._listener is not None:
            port = self._listener.getsockname()[1]
            self._store.set(_agent_key(self._rank), f"{self._address}:{port}")

    def wait(self, within_s: float, *, stop: Callable[[], bool] | None = None) -> None:
        """Announce that the workers of this node have ended, and wait for all nodes to do so.

        Args:
            stop: of workers that have finished their work: asked whether this node is to stop,
                which ends the wait. Then the first node gets as long as its agent lives: its
                workers may evaluate and save.
        """
        clock = AwakeClock()
        until_s = clock.now_s() + within_s
        # the store ends with its agent, which leaves once it has seen everybody
        with contextlib.suppress(Exception), contextlib.ExitStack() as stack:
            stack.callback(self._disconnect)
            self._store.set(_ended_key(self._rank), "1")
            working = sum(not self._store.check([_ended_key(rank)]) for rank in self._missing)
            if stop is not None:
                self._close_unless_enough(working)
            while stop is None or not stop():
                if not self._is_held:
                    missing = self._first_missing()
                    is_patient = stop is not None and missing == 0 and self._connection is not None
                    if missing is None or (clock.now_s() >= until_s and not is_patient):
                        return
                    if stop is not None:
                        self._leave_if_awaited()
                time.sleep(_POLL_S)

    def _close_unless_enough(self, working: int) -> None:
        """Let no worker wait to be restarted where fewer nodes than the minimum can meet again.

        Args:
            working: how many nodes of this round have workers that have not ended.
        """
        if self._is_patched:
            state = self._handler._state_holder.state
            spare = (state.wait_list | state.redundancy_list) - self._met
            if working + len(spare) < self._handler.settings.min_nodes:
                self._handler.set_closed()

    def _leave_if_awaited(self) -> None:
        """Leave this round, whose workers have ended here, if others wait for the next one: it
        begins when all have left this one. Spare nodes are not to take a place before that."""
        if self._is_patched and self._nodes_waiting() > 0:
            from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousExitOp

            handler = self._handler
            handler._stop_heartbeats()
            deadline = handler._get_deadline(handler.settings.timeout.close)
            handler._op_executor.run(_RendezvousExitOp(), deadline)

    def num_nodes_waiting(self) -> int:
        """Torch's count; 0 if the workers of this node are leaving, or the store has just gone.

        Raises:
            RendezvousConnectionError: the store has been gone for :data:`STORE_LOST_S`.
        """
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError

        if self._leaving():
            return 0
        try:
            waiting = self._nodes_waiting()
        except RendezvousConnectionError:
            if self._lost is None:
                clock = AwakeClock(self._interval_s)
                self._lost = clock, clock.now_s()
            clock, since_s = self._lost
            if clock.now_s() - since_s > STORE_LOST_S:
                raise
            return 0
        self._lost = None
        return waiting

    def _patch(self, handler: Any, holder: Any) -> bool:
        settings = getattr(handler, "settings", None)
        interval = getattr(settings, "keep_alive_interval", None)
        sanitize, sync = getattr(holder, "_sanitize", None), getattr(holder, "sync", None)
        if interval is None or not callable(sanitize) or not callable(sync):
            return False
        self._interval_s = interval.total_seconds()

        def sanitize_unless_suspended() -> None:
            if not self._allows():
                sanitize()

        def sync_unless_suspended() -> bool | None:
            """None is torch's own answer when it keeps the state that it has."""
            result: bool | None = None if self._is_held else sync()
            return result

        # torch has no public hook for either
        holder._sanitize = sanitize_unless_suspended
        holder.sync = sync_unless_suspended
        return True

    def _allows(self) -> bool:
        """Whether missing heartbeats are excused now. Called at each exchange with the store, about
        once a second and at least once per heartbeat interval."""
        now_s = time.monotonic()
        if now_s - self._seen_s > self._interval_s + 1.0:
            self._allow_until_s = now_s + ALLOWANCE_S
        self._seen_s = now_s
        return now_s < self._allow_until_s

    def _first_missing(self) -> int | None:
        """The first node whose workers run and whose agent is not known to be gone; None if there
        is none."""
        while self._missing:
            rank = self._missing[0]
            if not self._store.check([_ended_key(rank)]) and not self._is_gone(rank):
                return rank
            self._disconnect()
            self._missing.pop(0)
        return None

    def _disconnect(self) -> None:
        """The listener is for the others, and closes with this process."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _is_gone(self, rank: int) -> bool:
        if self._connection is None:
            if not self._store.check([_agent_key(rank)]):
                return False
            host, _, port = self._store.get(_agent_key(rank)).decode().rpartition(":")
            try:
                self._connection = socket.create_connection((host, int(port)), CONNECT_S)
                configure_socket(self._connection)
            except ConnectionRefusedError:
                return True
            except OSError:  # a firewall, a name that does not resolve: it may live
                return False
        watch = select.poll()
        watch.register(self._connection, select.POLLIN)
        return bool(watch.poll(0))


def _agent_key(rank: int) -> str:
    return f"hydroslurm/agent/{rank}"


def _ended_key(rank: int) -> str:
    return f"hydroslurm/ended/{rank}"


def in_order_of_tasks(handler: Any, where: Rendezvous, *, local_addr: str | None) -> None:
    """Patch torch's rendezvous handler to number the nodes of each round by their Slurm task.

    Args:
        handler: one whose nodes are all tasks of this job step.
        local_addr: torchrun's option; None: nobody has named an address of this node.
    """
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.utils import distributed

    torch_next_rendezvous = handler.next_rendezvous
    if local_addr is None:
        # the address at which all have met is known to lead to the first task
        met_at = where.endpoint.rpartition(":")[0]
        local_addr = met_at if where.rank == 0 else socket.getfqdn()

    def next_rendezvous() -> RendezvousInfo:
        met = torch_next_rendezvous()
        store = PrefixStore("hydroslurm/order", met.store)  # met.store belongs to this round alone
        store.set(f"task/{met.rank}", str(where.rank))
        tasks = store.multi_get([f"task/{number}" for number in range(met.world_size)])
        rank = sorted(map(int, tasks)).index(where.rank)
        if handler.use_agent_store:  # the store of torch's first node serves the workers, too
            return RendezvousInfo(met.store, rank, met.world_size, met.bootstrap_store_info)
        if rank == 0:
            port = distributed.get_free_port()  # type: ignore[no-untyped-call]
            store.set("master", f"{local_addr}:{port}")
        address, _, port = store.get("master").decode().rpartition(":")
        master = RendezvousStoreInfo(address, int(port))
        return RendezvousInfo(met.store, rank, met.world_size, master)

    handler.next_rendezvous = next_rendezvous

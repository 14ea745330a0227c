"""Torch's elastic agent, changed where it would end workers that are saving.

This runs torchrun's own code and replaces only the class of its agent. What differs:

- A worker that exits with 75, 93 or 143 has saved on purpose: it is not restarted, and its siblings
  are left alone until they have exited too (torch's ``PContext.wait`` sends them SIGTERM at once,
  and SIGKILL 30 s later).
- For a restart, workers that listen to SIGTERM are ended with SIGKILL: they would take SIGTERM for
  a stop of the job, save, and have the whole job requeued.
- A stop that arrives before there are workers ends the agent at once.
- When workers failed for good, the agent exits with the status of the first.
- Workers are preemptible, as below ``srun --preempt``, unless ``HYDROSLURM_PREEMPT=off``.
- Nodes are numbered as Slurm numbers its tasks.
- Workers get ``HYDROSLURM_INCARNATION``, the same on all nodes and new in each round: torch's own
  TORCHELASTIC_RESTART_COUNT stays the same on a node that restarts because of another node.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed.run
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api as launcher

from hydroslurm.coordination.authentication import KEY_BYTES, derive
from hydroslurm.coordination.world import INCARNATION_ENV, KEY_ENV
from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.core.exitcodes import CANCELLED, FAILED
from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.errors import LaunchError
from hydroslurm.jobs.agent.node import Departed, Node
from hydroslurm.jobs.agent.rendezvous import (
    Peers,
    Rendezvous,
    fill_in,
    in_order_of_tasks,
)
from hydroslurm.jobs.agent.workers import (
    are_leaving,
    exit_codes,
    failure_status,
    node_status,
    what_is_missing,
)
from hydroslurm.runtime import autoload

LINGER_S = 60.0
"""How long to wait for any sign that the siblings of a worker that has left on purpose leave
too."""
LEAVE_TOGETHER_S = 10.0
"""How long a node waits for the others to leave: one that goes first may take the store with it,
and makes ``srun --kill-on-bad-exit`` end those that are still saving."""
_POLL_S = 0.05
# untyped, and so is what it returns
_torchrun: Any = torch.distributed.run


class NodeAgent(LocalElasticAgent):
    """One node's agent. All of it runs in the main thread.

    Attributes:
        status: the agent's exit status, once its workers have left on purpose.
        failed: its exit status if its workers are not restarted; None while none has failed.
    """

    def __init__(
        self, node: Node, spec: WorkerSpec, *args: Any, has_peers: bool = True, **kwargs: Any
    ) -> None:
        """``has_peers``: it meets others by torch's rendezvous; False for a member of an elastic
        run, whose coordinator sees to that."""
        super().__init__(spec, *args, **kwargs)
        self.status: int | None = None
        self.failed: int | None = None
        self._node = node
        self._monitoring = False
        self._leaving = False
        self._peers: Peers | None = None
        if has_peers:
            self._peers = Peers(
                spec.rdzv_handler,
                leaving=lambda: self._leaving or self._stop_asked(),
                warn=node.log.warning,
            )
            node.on_suspend(self._peers.suspend)

    def _stop_asked(self) -> bool:
        """Whether workers that end now may have been asked to."""
        return self._node.stop_asked.is_set()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        if self._peers is None:  # a stop while this waits is announced, and answered
            super()._rendezvous(worker_group)
            return
        with self._node.signal_pipe.interruptible():
            self._unless_stopped()
            super()._rendezvous(worker_group)
            os.environ[INCARNATION_ENV] = incarnation_of(worker_group)
        self._peers.joined(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._unless_stopped()
        self._leaving, self.status, self.failed = False, None, None
        # a signal that arrives before the workers listen stays pending for them
        held = autoload.killing(os.environ) if autoload.is_asked(os.environ) else ()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
        try:
            pids: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._pcontext is not None
        self._pcontext.close = functools.partial(  # type: ignore[method-assign]
            self._close, self._pcontext, self._pcontext.close
        )
        self._node.started(worker_group.group_rank or 0, pids)
        return pids

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        self._node.workers.kill_listeners()
        super()._stop_workers(worker_group, *args, **kwargs)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._node.workers.look()
        self._monitoring = True
        try:
            result: RunResult = super()._monitor_workers(worker_group)
        finally:
            self._monitoring = False
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            codes = [failure.exitcode for failure in result.failures.values()]
            stop_asked = self._stop_asked()
            self.status = node_status(codes, stop_asked=stop_asked)
            if self.status is not None or stop_asked:
                self._remaining_restarts = 0
                if self._peers is not None:
                    self._peers.wait(LEAVE_TOGETHER_S)
        return result

    def _exit_barrier(self) -> None:
        """Replace torch's, which waits in C++, where no signal handler runs, and whole for an agent
        that is gone. A stop only concerns the other nodes: the workers of this one are done."""
        if self._peers is not None:
            self._peers.wait(self._exit_barrier_timeout, stop=self._stop_asked)

    def _close(
        self,
        pcontext: PContext,
        close: Callable[..., None],
        death_sig: signal.Signals | None = None,
        timeout: int = 30,
    ) -> None:
        """Replace ``PContext.close``, which torch calls when the first worker has failed, and when
        all have ended."""
        if self._monitoring:
            self._wait_for_leavers(pcontext)
        close(death_sig, timeout)

    def _wait_for_leavers(self, pcontext: PContext) -> None:
        """Wait for workers that leave by themselves; end those that cannot go on."""
        clock = AwakeClock()
        give_up_s = clock.now_s() + LINGER_S
        while True:
            codes = exit_codes(pcontext)
            stop_asked = self._stop_asked()
            if self.failed is None:  # its siblings are about to be ended, and fail, too
                ended = [code for code in codes.values() if code is not None]
                self.failed = failure_status(ended, stop_asked=stop_asked)
            living = [local_rank for local_rank, code in codes.items() if code is None]
            in_time = clock.now_s() < give_up_s
            others_leave = in_time or self._node.workers.are_stopping(living)
            if not are_leaving(codes.values(), stop_asked=stop_asked, others_leave=others_leave):
                break
            self._leaving = True
            time.sleep(_POLL_S)
            self._node.workers.look()
        if living:
            self._node.workers.kill_listeners()

    def _unless_stopped(self) -> None:
        """A member's workers are started all the same, for the generation has been named: they are
        owed the stop.

        Raises:
            Departed: a stop was requested.
        """
        if self._peers is not None and self._stop_asked():
            raise Departed(CANCELLED)


def launch(
    arguments: list[str],
    *,
    node: Node,
    where: Rendezvous | None,
    key: bytes | None,
    run: ElasticFolder | None = None,
) -> int:
    """Run torchrun in this process and return the exit status.

    Args:
        run: the elastic run that this node is a member of; see
            :mod:`hydroslurm.jobs.agent.restart`.
        key: shared by the agents of all nodes; the workers get one derived from it. None on a
            single node makes a new one.

    Raises:
        SystemExit: the arguments are wrong; torchrun has printed why.
        LaunchError: the agent of this version of torch cannot be replaced.
        UsageError: the arguments say where a member of an elastic run meets the others.
    """
    chosen = _torchrun.parse_args(arguments)
    missing = what_is_missing(
        chosen.training_script, is_program=chosen.no_python, is_module=chosen.module
    )
    if missing is not None:
        node.log.warning(missing[1])
        return missing[0]
    if where is not None and fill_in(chosen, where, untouched=_untouched()):
        node.log.info(f"{where.nnodes} nodes meet at {where.endpoint} ({where.run_id})")
    _leave_signals_to(node, chosen)
    if key is None and where is None and chosen.nnodes in ("1", "1:1"):
        key = secrets.token_bytes(KEY_BYTES)
    if key is not None:
        os.environ[KEY_ENV] = derive(key, "workers").hex()
    if not os.environ.get(autoload.PREEMPT_ENV):
        os.environ[autoload.PREEMPT_ENV] = "pause"
    # with a shared store a restarted rank may find the address of a peer that is gone
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    ours = where if where is not None and chosen.rdzv_id == where.run_id else None
    with contextlib.ExitStack() as stack:
        make: Callable[..., NodeAgent] = functools.partial(NodeAgent, node)
        if run is not None:
            from hydroslurm.jobs.agent import restart

            restart.prepare(chosen, untouched=_untouched(), folder=run)
            make = stack.enter_context(restart.joined(run, node))
        agents = stack.enter_context(_agents_of(make, ours))
        try:
            # writes the error file of a failed worker, as it does for torchrun
            return int(record(_run)(chosen, agents) or 0)
        except ChildFailedError as error:
            # torch's table says which worker failed, how and when
            node.log.warning("".join(traceback.format_exception_only(error)).strip())
            first = error.get_first_failure()[1].exitcode
            failed = agents[-1].failed if agents else None
            return failed or failure_status([first], stop_asked=False) or FAILED
        except RendezvousError as error:
            failed = agents[-1].failed if agents else None
            if failed is None:
                raise
            kind = type(error).__name__
            node.log.warning(f"too few nodes are left to restart the workers that failed ({kind})")
            return failed


def _run(chosen: Any, agents: list[NodeAgent]) -> int:
    try:
        _torchrun.run(chosen)
    except Departed as departed:
        return departed.status
    except ChildFailedError:
        if agents and agents[-1].status is not None:
            return agents[-1].status
        raise
    return 0


@contextlib.contextmanager
def _agents_of(
    make_agent: Callable[..., NodeAgent], where: Rendezvous | None
) -> Iterator[list[NodeAgent]]:
    """Make torchrun create our agents; yields the list of those that it has created.

    Args:
        make_agent: with the arguments of torch's.
        where: None if the nodes that meet are not, or not only, the tasks of this job step.
    """
    if not hasattr(launcher, "LocalElasticAgent"):
        raise LaunchError(
            "this version of torch creates its agent in an unknown way; start one srun task per "
            "rank, without torchrun"
        )
    made: list[NodeAgent] = []

    def make(spec: WorkerSpec, *args: Any, **kwargs: Any) -> NodeAgent:
        if where is not None:
            in_order_of_tasks(spec.rdzv_handler, where, local_addr=spec.local_addr)
        made.append(make_agent(spec, *args, **kwargs))
        return made[-1]

    before = launcher.LocalElasticAgent
    launcher.LocalElasticAgent = make
    try:
        yield made
    finally:
        launcher.LocalElasticAgent = before


def _leave_signals_to(node: Node, chosen: Any) -> None:
    """Torch's handlers end the workers; for our signals ours stay in place. Before torch 2.9 the
    list is fixed, and Node.started takes them back."""
    named = getattr(chosen, "signals_to_handle", None)
    if named is None:
        return
    ours = {signal.Signals(signo).name for signo in node.signals if signo < signal.SIGRTMIN}
    kept = [name.strip() for name in named.split(",") if name.strip() not in ours]
    # torch warns of an empty list
    chosen.signals_to_handle = ",".join(kept or ["SIGINT"])


def _untouched() -> Any:
    return _torchrun.parse_args(["a_script"])


def incarnation_of(worker_group: Any) -> str:
    """One id for all nodes of this round: the first writes it, the others read it."""
    store = worker_group.store
    if worker_group.group_rank == 0:
        store.set("hydroslurm/incarnation", uuid.uuid4().hex)
    return str(store.get("hydroslurm/incarnation").decode())

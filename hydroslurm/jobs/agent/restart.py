"""The restart engine: an agent is a member of an elastic run, and starts its workers again in each
generation.

For any script that torchrun can start. The coordinator names the exact members of a generation, so
that nobody waits for a heartbeat or a last call; it is asked over the authenticated connection that
every member has (:mod:`hydroslurm.elastic.member`), and no store of torch's decides anything. The
workers of a generation have one, which its first rank hosts where its agent has found a free port.
The agent speaks for its node, as one rank:

    the coordinator calls     the workers get SIGTERM as soon as they listen; they stop together,
                              save and leave; the agent then holds
    a worker fails            the agent says so at once. Who says it first is to blame; the workers
                              of all others fail by that, or are killed
    a member is gone          workers are killed, and the agent holds
    a generation is named     its first member says where its rank 0 will listen; all start theirs

Only the first failure is charged to a member, by ``--max-restarts``: others' ends, and changes of
size, are free. The key of the workers' connections is made of the run's and the generation's
number, so that one of an older generation meets nobody.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from hydroslurm.coordination.authentication import derive
from hydroslurm.coordination.network import own_address
from hydroslurm.coordination.world import COORDINATOR_PORT_TRIES, INCARNATION_ENV, KEY_ENV, World
from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.core.exitcodes import FAILED, MUST_NOT_RUN_AGAIN
from hydroslurm.core.rundir import ELASTIC_ENV, GENERATION_ENV, variables_of
from hydroslurm.elastic.folder import MEMBER_ENV, ElasticFolder, member_name
from hydroslurm.elastic.member import Member
from hydroslurm.elastic.roster import MEETING_S, Depart, Directive, Form, Save, Timing
from hydroslurm.errors import CoordinatorLost, UsageError
from hydroslurm.jobs.agent.elastic import LINGER_S, NodeAgent
from hydroslurm.jobs.agent.node import Departed, Node
from hydroslurm.jobs.agent.progress import Progress, Watch
from hydroslurm.jobs.agent.workers import exit_codes
from hydroslurm.slurm.allocation import ALONE_ENV

MONITOR_S = 0.02
"""Between two looks at the workers: a worker that fails has to be seen before those of other nodes
have failed by its end, which takes Python some 50 ms."""
LOOK_S = 1.0
"""Between two looks at what they tell, which they do more seldom."""
BACKEND = "hydroslurm"
_OWN = ("nnodes", "node_rank", "standalone", "master_addr", "master_port")
_RENDEZVOUS = ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf")


class Generations(RendezvousHandler):
    """Torch's rendezvous: waits for what the coordinator says.

    Attributes:
        pending: a generation that this member is of, and whose workers are not started yet.
        form: the one whose workers run.
    """

    def __init__(self, folder: ElasticFolder, node: Node, member: Member) -> None:
        self.pending: Form | None = None
        self.form: Form | None = None
        self.member = member
        self._folder = folder
        self._node = node

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a generation with this member.

        Raises:
            Departed: there will be none.
        """
        form = self.pending or self.obey(self.member.begin())
        while True:
            if form is None:
                raise Departed(0)
            name = f"elastic {self.get_run_id()} change {form.change} generation {form.generation}"
            key = derive(self._folder.key(), name)
            try:
                master = self._meet(form, name, key)
                break
            except CoordinatorLost as error:
                self._node.log.warning(f"generation {form.generation} is not formed: {error}")
                self.member.formed(form, ok=False, error=str(error))
                form = self.obey(self.member.again())
        self.pending, self.form = None, form
        os.environ[GENERATION_ENV] = str(form.generation)
        os.environ[INCARNATION_ENV], os.environ[KEY_ENV] = name, key.hex()
        self._node.log.info(
            f"generation {form.generation}: member {form.rank} of {form.world_size} ({form.cause})"
        )
        return RendezvousInfo(HashStore(), form.rank, form.world_size, master)

    def obey(self, directive: Directive) -> Form | None:
        """What is to be done next; None: the training is complete.

        Raises:
            Departed: nothing, this member leaves.
        """
        while isinstance(directive, Save):  # the workers have saved before they left
            self.member.saved(directive)
            directive = self.member.again()
        if isinstance(directive, Depart):
            log = self._node.log.warning if directive.failed else self._node.log.info
            log(f"this member leaves: {directive.reason or 'asked to'}")
            raise Departed(directive.exit_status(stops=self._node.stop_asked.is_set()))
        return directive if isinstance(directive, Form) else None

    def _meet(self, form: Form, name: str, key: bytes) -> RendezvousStoreInfo:
        """Where rank 0 of the workers will listen.

        Raises:
            CoordinatorLost: its agent has not said so.
        """
        if form.rank == 0:
            free = _free_port(name, key)
            self.member.set_value("master", f"{own_address(os.environ)}:{free}".encode())
        (said,) = self.member.get_values(["master"], timeout_s=MEETING_S)
        host, _, port = said.decode().rpartition(":")
        return RendezvousStoreInfo(host, int(port))

    def num_nodes_waiting(self) -> int:
        """Whether the workers are to be started again, which torch does for any positive number."""
        return int(self.pending is not None)

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._folder.run.name

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Only the coordinator ends a run."""

    def shutdown(self) -> bool:
        self.member.close()
        return True


class MemberAgent(NodeAgent):
    """The agent of one member."""

    def __init__(
        self,
        node: Node,
        generations: Generations,
        timing: Timing,
        spec: WorkerSpec,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(node, spec, *args, has_peers=False, **kwargs)
        self._generations = generations
        self._member = generations.member
        self._restarts_left = spec.max_restarts
        self._clock = AwakeClock()
        self._asked_s: float | None = None
        self._said_step = True
        self._timing = timing
        self._watch = Watch(timing)
        self._look_at_s = 0.0
        self._hang = ""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids = super()._start_workers(worker_group)
        self._asked_s, self._said_step = None, worker_group.group_rank != 0
        self._watch = Watch(self._timing)
        self._look_at_s, self._hang = 0.0, ""
        self._member.note_progress(0, None)  # those of before do not count once one has resumed
        self._member.note_pace(0.0, 0.0)  # that of another size is taken for the one of this
        form = self._generations.form
        assert form is not None
        self._member.formed(form, ok=True)
        self._member.has_state = False  # that is on disk
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._look_at_members()
        self._look_at_workers()
        result = super()._monitor_workers(worker_group)
        self._remaining_restarts = self._restarts_left
        if result.state is WorkerState.HEALTHY:
            return result
        last = self._look_at_workers(at_once=True)
        self._generations.pending = self._generations.obey(self._after_end(result, last))
        if self._generations.pending is None:
            ended = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=ended)
        return RunResult(state=WorkerState.HEALTHY)  # torch then asks num_nodes_waiting()

    def _look_at_members(self) -> None:
        """Pass on what the coordinator has said since the last look."""
        now_s = self._clock.now_s()
        if self._node.stop_asked.is_set():
            self._member.leave(self._node.stop_reason)
        if self._member.broken or self._member.is_dismissed:
            self._node.workers.kill()
        elif self._asked_s is None and self._member.is_called:
            self._asked_s = now_s
            self._node.workers.stop()
        elif self._asked_s is not None and now_s - self._asked_s > LINGER_S and not self._stops():
            self._node.log.warning(
                f"the workers were asked to stop {LINGER_S:g} s ago, and do not: they are killed, "
                "and what they have not saved is trained again"
            )
            self._node.workers.kill()

    def _stops(self) -> bool:
        return self._node.workers.are_stopping(range(self._worker_group.spec.local_world_size))

    def _look_at_workers(self, *, at_once: bool = False) -> Progress:
        """Say how far they are, as far as they tell, and end them if one hangs."""
        now_s = time.monotonic()
        if now_s < self._look_at_s and not at_once:
            return Progress()
        workers, member = self._node.workers.all, self._member
        statuses, awaited = self._node.workers.statuses(), member.awaited
        assert self._pcontext is not None
        ended = [rank for rank, code in exit_codes(self._pcontext).items() if code == 0]
        found = self._watch.look(workers, statuses, ended=ended, awaited=awaited, now_s=now_s)
        self._look_at_s = now_s + (LOOK_S if self._said_step else MONITOR_S)
        member.note_progress(
            found.step,
            found.collectives,
            meeting_s=found.meeting_s,
            ended=bool(ended),
            paused=found.paused,
        )
        if found.step_s:
            form = self._generations.form
            share = 1 / form.world_size if form is not None else 1.0
            member.note_pace(found.step_s, found.samples_per_s * share)
        if found.step is not None and not self._said_step:
            self._said_step = True
            member.resumed(found.step)
        if found.hangs and self._asked_s is None and not member.broken:
            self._hang = found.hangs
            member.fail(found.hangs)  # before others fail by the end of these
            self._node.workers.kill()
        return found

    def _after_end(self, result: RunResult, last: Progress) -> Directive:
        """All workers of this node have ended: hold, and wait for what the coordinator says."""
        member = self._member
        if result.state is WorkerState.SUCCEEDED:
            # who was asked to stop may have left with status 0 for that; else it does so again
            return member.hold(final=not self._stop_asked())
        form = self._generations.form
        met = last.met or form is None or form.world_size == 1
        if member.is_dismissed or (member.broken and not self._hang):
            if last.error and not met:  # another was faster to tell, and may not know why
                member.fail(last.error, met=False, lost_peer=last.lost_peer)
            return member.hold(failed=True)
        left = self.status is not None and self.status != MUST_NOT_RUN_AGAIN
        if left or self._stop_asked():
            return member.hold(failed=not left)
        reason = self._hang or _what_happened(result, status=self.status)
        if last.error and not self._hang:
            reason = f"{reason} ({last.error})"
        if member.blame(reason, met=met, lost_peer=last.lost_peer) == member.name:
            if self.status == MUST_NOT_RUN_AGAIN or not self._restarts_left:
                self._node.log.warning(f"{reason}; this member leaves")
                raise Departed(self.status or self.failed or FAILED)
            self._restarts_left -= 1
            self._remaining_restarts = self._restarts_left  # for TORCHELASTIC_RESTART_COUNT
            self._node.log.warning(f"{reason}; {self._restarts_left} restarts are left")
        return member.hold(failed=True)

    def _stop_asked(self) -> bool:
        return super()._stop_asked() or self._asked_s is not None


def _what_happened(result: RunResult, *, status: int | None) -> str:
    """``worker 1 was killed by SIGKILL``; of several that of the lowest exit code, which a signal
    has."""
    failures = result.failures.items()
    if status == MUST_NOT_RUN_AGAIN or not failures:
        return f"its workers left with status {status}"
    rank, failure = min(failures, key=lambda one: (one[1].exitcode, one[0]))
    how = f"exited with status {failure.exitcode}"
    if failure.exitcode < 0:
        how = f"was killed by {failure.signal_name()}"
    return f"rank {rank} {how}"


def _free_port(name: str, key: bytes) -> int:
    """A port that is free now, and stays so for the seconds until rank 0 listens there: none that
    Linux gives to whoever asks for any.

    Raises:
        CoordinatorLost: there is none, so that the generation is not formed here.
    """
    for number in range(COORDINATOR_PORT_TRIES):
        port = World(incarnation_id=f"{name} {number}").torch_port(key)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise CoordinatorLost("no port is free on this node for the store of the workers")


def prepare(chosen: Any, *, untouched: Any, folder: ElasticFolder) -> None:
    """Set in torchrun's parsed arguments that the coordinator says who meets.

    Raises:
        UsageError: they say it, too.
    """
    named = [
        name
        for name in (*_OWN, *_RENDEZVOUS)
        if getattr(chosen, name, None) != getattr(untouched, name, None)
    ]
    if named:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in named)
        raise UsageError(
            f"{options}: the coordinator of this elastic run says which nodes train together. "
            "Leave it out; `elastic: {min: ..., max: ...}` in the job spec says how many"
        )
    size = folder.options().size
    chosen.nnodes = f"{size.min}:{size.max}"
    chosen.rdzv_backend, chosen.rdzv_id = BACKEND, folder.run.name
    chosen.rdzv_endpoint = BACKEND  # without one torch warns
    if chosen.monitor_interval == untouched.monitor_interval:
        chosen.monitor_interval = MONITOR_S


@contextlib.contextmanager
def joined(folder: ElasticFolder, node: Node) -> Iterator[Callable[..., MemberAgent]]:
    """Join the run; yields what makes the agent. The environment becomes that of its
    workers, who are no members themselves."""
    environ, options = os.environ, folder.options()
    member = Member(
        folder,
        name=member_name(environ),
        node=environ.get("SLURMD_NODENAME", ""),
        stop=node.stop_asked.is_set,
        warn=node.log.warning,
    )
    generations = Generations(folder, node, member)

    def handler_of(_: RendezvousParameters) -> RendezvousHandler:
        return generations

    rendezvous_handler_registry.register(BACKEND, handler_of)
    for name in (ELASTIC_ENV, MEMBER_ENV, ALONE_ENV, "MASTER_ADDR"):
        environ.pop(name, None)
    environ |= variables_of(folder.run, environ)
    # else each agent waits for a store of torch's to learn how many workers the others have
    environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    member.start()
    try:
        yield functools.partial(MemberAgent, node, generations, options.timing)
    finally:
        member.close()

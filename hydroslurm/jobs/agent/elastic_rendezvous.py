"""Torch's rendezvous for the agents of an elastic run: the coordinator says who meets.

Nobody waits for a heartbeat or a last call, and no store of torch's decides anything. The workers
of a generation have one, which its first rank hosts where its agent has found a free port.
"""

from __future__ import annotations

import contextlib
import os
import socket

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from hydroslurm.coordination.authentication import derive
from hydroslurm.coordination.network import own_address
from hydroslurm.coordination.world import COORDINATOR_PORT_TRIES, INCARNATION_ENV, KEY_ENV, World
from hydroslurm.core.exitcodes import FAILED, RUN_AGAIN
from hydroslurm.core.rundir import GENERATION_ENV
from hydroslurm.elastic.directives import Depart, Directive, Form, Save
from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.elastic.member import Member
from hydroslurm.errors import CoordinatorLost
from hydroslurm.jobs.agent.node import Node
from hydroslurm.jobs.agent.signal_pipe import Departed

BACKEND = "hydroslurm"


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
        form = self.pending or self.obey(self.member.begin(stop=self.stop_seen))
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
                form = self.obey(self.member.again(stop=self.stop_seen))
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
            directive = self.member.again(stop=self.stop_seen)
        if isinstance(directive, Depart):
            self._node.log.info(f"this member leaves: {directive.reason or 'asked to'}")
            again = directive.again or self._node.stop_asked.is_set()
            raise Departed(FAILED if directive.failed else RUN_AGAIN if again else 0)
        return directive if isinstance(directive, Form) else None

    def stop_seen(self) -> bool:
        return self._node.stop_asked.is_set()

    def _meet(self, form: Form, name: str, key: bytes) -> RendezvousStoreInfo:
        """Where rank 0 of the workers will listen.

        Raises:
            CoordinatorLost: its agent has not said so.
        """
        if form.rank == 0:
            free = _free_port(name, key)
            self.member.set_value("master", f"{own_address(os.environ)}:{free}".encode())
        host, _, port = self.member.get_values(["master"])[0].decode().rpartition(":")
        return RendezvousStoreInfo(host, int(port))

    def num_nodes_waiting(self) -> int:
        """Whether the workers are to be started anew, which torch does for any positive number."""
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

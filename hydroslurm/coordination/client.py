"""``CoordinatorClient``: the other ranks of a job step, as one of them sees them."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hydroslurm.coordination.agreements import PendingAgreements
from hydroslurm.coordination.channel import (
    CoordinatorChannel,
    find_coordinator,
    join_coordinator,
)
from hydroslurm.coordination.messages import MAX_CUT_OFF, MAX_TEXT, Message, ranks_of
from hydroslurm.coordination.pause_barrier import Emit, PauseBarrier
from hydroslurm.coordination.rendezvous import start_coordinator
from hydroslurm.coordination.secret import Secret
from hydroslurm.coordination.stop_barrier import StopBarriers
from hydroslurm.coordination.world import World
from hydroslurm.core.events import EventKind
from hydroslurm.core.threads import thread
from hydroslurm.errors import CoordinatorLost, NoSecret

if TYPE_CHECKING:
    from hydroslurm.gate.native_gate import NativeGate

JOIN_S = 600.0
"""How long a rank looks for the others: nodes boot, containers are fetched, imports go over a slow
file system."""
REJOIN_S = 20.0
"""The same for the replacement of a killed coordinator."""
WOKEN_LATE_S = 2.0
"""A wait that ends this late means that this process was stopped meanwhile."""


class CoordinatorClient:
    """Connects this rank with the others in the background, without slowing down any step.

    Attributes:
        rank, world_size: as in :class:`World`.
        stop_barriers: where all ranks stop or save; see there.
        agree: submits a value, and gets everybody's; see :meth:`PendingAgreements.agree`.
        on_gate_event: for the controller, when the gate has moved.
        lost: why nothing connects the ranks (any more); None while something does, or still may.
        done: this rank has trained to the end, or stopped with the others; set it before leaving.
            A rank that leaves without it has failed, and the others will not wait for it.
        stopping: this rank obeys a stop; set it before it does. If the coordinator is lost from
            then on, this rank leaves without the others: at a new coordinator it would wait for
            ranks that have left already.
    """

    def __init__(
        self,
        world: World,
        gate: NativeGate,
        *,
        secret: Callable[[], Secret],
        emit: Emit,
        on_stop: Callable[[str, int], None],
        warn: Callable[[str], None],
    ) -> None:
        """
        Args:
            secret: how this rank authenticates; called once, in a thread of this object.
            emit: writes an event of this rank.
            on_stop: another rank is to stop, and so is this one; gets the signal and the rank that
                received it, not in the training thread.
            warn: tells a person.
        """
        self.rank = world.rank
        self.world_size = world.world_size
        self.stop_barriers = StopBarriers()
        self.lost: CoordinatorLost | None = None
        self.done = False
        self.stopping = False
        self._world = world
        self._find_secret = secret
        self._secret: Secret | None = None
        self._emit = emit
        self._on_stop = on_stop
        self._warn = warn
        self._lock = threading.Lock()
        self._agreements = PendingAgreements(
            world_size=world.world_size, send=self._send, lost=lambda: self.lost
        )
        self.agree = self._agreements.agree
        self._unsent: list[Message] = []
        self._channel: CoordinatorChannel | None = None
        self._all_joined = threading.Event()
        self._connected = False
        self._rejoin_by_s = math.inf
        self._stop_message: str | None = None
        self._leaving = False
        self._gone: dict[int, bool] = {}
        self._pause_barrier = PauseBarrier(gate, send=self._send, emit=emit, wake=self._wake)
        self.on_gate_event = self._pause_barrier.on_gate_event
        self._began_s = time.monotonic()
        self._thread = thread(self._run, name="hydroslurm-ranks")

    def start(self) -> None:
        """Begin to look for the others; return at once."""
        self._thread.start()

    @property
    def gone(self) -> Mapping[int, bool]:
        """Ranks that have ended, and whether they died."""
        return dict(self._gone)

    @property
    def have_joined(self) -> bool:
        """Whether all ranks have joined."""
        return self._all_joined.is_set()

    def wait_for_all(self, *, timeout_s: float | None = None) -> bool:
        """Wait until all ranks have joined; return whether they have.

        Raises:
            CoordinatorLost: they cannot be reached (any more).
        """
        joined = self._all_joined.wait(timeout_s)
        if self.lost is not None:
            raise self.lost
        return joined

    def call(self, kind: str, message: str = "") -> None:
        """Call a stop barrier of a kind (``stop`` or ``save``): all ranks will hold it at one safe
        point.

        Sent once the others can be reached; does nothing if nothing connects them any more.
        """
        if kind == "stop":
            self._stop_message = message
        try:
            self._send({"type": "call_barrier", "kind": kind, "message": message[:MAX_TEXT]})
        except CoordinatorLost:
            return

    def leave(self) -> None:
        """End this rank's part; tell the others whether it is :attr:`done`. May be called twice."""
        self._leaving = True
        try:
            if self._channel is not None:
                self._channel.send({"type": "leave", "done": self.done})
        except CoordinatorLost:
            pass
        if self._channel is not None:
            self._channel.close()
        self._pause_barrier.lose()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        if self._secret is not None:
            self._secret.forget()

    # --- the thread

    def _run(self) -> None:
        """Serve one coordinator after the other: one that is killed is replaced."""
        world = self._world
        for number in itertools.count(1):
            try:
                self._serve(world, timeout_s=JOIN_S if number == 1 else REJOIN_S)
                return
            except NoSecret as error:
                self._lose(CoordinatorLost(str(error)))
                return
            except CoordinatorLost as error:
                if not self._may_rejoin():
                    self._lose(error)
                    return
                self._interrupt(error)
            except Exception as error:  # nobody waits for the result of this thread
                self._lose(CoordinatorLost(f"{type(error).__name__}: {error}"))
                return
            # other ports and another id: no rank may join what is left of the last one
            incarnation_id = f"{self._world.incarnation_id} coordinator {number + 1}"
            world = replace(self._world, incarnation_id=incarnation_id)

    def _serve(self, world: World, *, timeout_s: float) -> None:
        if self._secret is None:
            self._secret = self._find_secret()
        secret = self._secret
        if world.rank == 0:  # the first rank starts the coordinator
            ports: tuple[int, ...] = (start_coordinator(world, secret),)
        else:
            ports = world.coordinator_ports(secret.port_key)
        found = find_coordinator(
            world, secret, ports=ports, timeout_s=timeout_s, stop=lambda: self._leaving
        )
        cut_off = sorted(self._agreements.cut_off)[:MAX_CUT_OFF]
        channel = CoordinatorChannel(
            join_coordinator(found, world, cut_off),
            on_message=self._on_message,
            due_s=self._due_s,
            tick=self._tick,
        )
        with self._lock:
            self._channel, unsent = channel, self._unsent
            self._unsent = []
            for message in unsent:
                channel.send(message)
        self._pause_barrier.catch_up()
        if self._leaving:
            channel.close()
        channel.run()

    def _due_s(self) -> float | None:
        pause_due_s = self._pause_barrier.due_s
        if self._connected or math.isinf(self._rejoin_by_s):
            return pause_due_s
        return min(self._rejoin_by_s, math.inf if pause_due_s is None else pause_due_s)

    def _tick(self) -> None:
        late_s = time.monotonic() - self._rejoin_by_s
        if late_s > WOKEN_LATE_S:  # it was stopped itself, and so were the others
            self._rejoin_by_s = time.monotonic() + REJOIN_S
        elif late_s >= 0 and not self._connected:
            raise CoordinatorLost(
                "what connected the ranks of this job is gone, and not all ranks joined its "
                "replacement"
            )
        self._pause_barrier.tick()

    def _on_message(self, message: Message) -> None:
        kind = message["type"]
        if kind in ("hold", "count", "let_through", "describe", "all_parked", "release"):
            self._pause_barrier.on_message(message)
        elif kind == "agreed":
            self._agreements.agreed(message)
        elif kind == "agreement_failed":
            self._agreements.failed(message)
        elif kind == "barrier_called":
            self._barrier_called(message)
        elif kind == "barrier_agreed":
            self._barrier_agreed(message)
        elif kind == "barrier_failed":
            self.stop_barriers.fail(
                message["barrier"],
                missing=tuple(ranks_of(message["missing"])),
                finished=message["finished"],
            )
        elif kind == "ranks_gone":
            self._gone |= dict.fromkeys(ranks_of(message["left"]), False)
            for rank in ranks_of(message["died"]):
                self._gone[rank] = True
                self._emit(EventKind.RANK_GONE, {"of_rank": rank})
        elif kind == "all_joined":
            self._connect(message)
        elif kind == "fault":
            self._warn(
                f"the coordinator of the ranks has failed on a message: {message['message']}"
            )

    def _connect(self, message: Message) -> None:
        took_s = time.monotonic() - self._began_s
        assert self._secret is not None
        self._emit(
            EventKind.RANKS_JOINED,
            {
                "world_size": self.world_size,
                "joined_s": took_s,
                "key_from": self._secret.source,
            },
        )
        self._connected = True
        self._agreements.reconnected(message["cut_off"])
        self._all_joined.set()
        if self._stop_message is not None:
            self.call("stop", self._stop_message)  # the coordinator that knew of it may be gone

    def _barrier_called(self, message: Message) -> None:
        kind, of_rank, text = message["kind"], message["of_rank"], message["message"] or ""
        number = message["barrier"]
        proposal = self.stop_barriers.call(number, kind, of_rank=of_rank, message=text)
        self._send({"type": "propose", "barrier": number, "safe_point_index": proposal})
        if kind == "stop" and of_rank != self.rank:
            self._on_stop(text, of_rank)

    def _barrier_agreed(self, message: Message) -> None:
        barrier = self.stop_barriers.decide(message["barrier"], message["safe_point_index"])
        if barrier is not None and barrier.kind == "stop":
            self._emit(
                EventKind.STOP_AGREED,
                {
                    "of_rank": barrier.of_rank,
                    "signal": barrier.message or None,
                    "proposal": barrier.proposal,
                    "safe_point_index": barrier.safe_point_index,
                },
            )

    def _may_rejoin(self) -> bool:
        """Whether all ranks can join another coordinator: they had all joined this one, and none
        has ended or is about to."""
        about_to_end = self._leaving or self.stopping
        return self._connected and not self._gone and not about_to_end

    def _interrupt(self, error: CoordinatorLost) -> None:
        """Between two coordinators nothing is decided: fail what is pending."""
        with self._lock:
            self._channel = None
            self._unsent = []
        self._connected = False
        self._rejoin_by_s = time.monotonic() + REJOIN_S
        self._pause_barrier.lose()
        self.stop_barriers.forget()
        self._agreements.interrupt(error)
        self._emit(EventKind.COORDINATOR_LOST, {"message": str(error)})
        if self.rank == 0:
            self._warn(f"{error}; it is started again. A save in progress has failed")

    def _lose(self, error: CoordinatorLost) -> None:
        if self._leaving or self.lost is not None:
            return
        self.lost = error
        self._pause_barrier.lose()
        self.stop_barriers.lose(error)
        self._agreements.fail(error)
        self._all_joined.set()
        self._emit(EventKind.AGREEMENT_FAILED, {"what": "connection", "message": str(error)})
        self._warn(
            f"{error}. This rank keeps training and pauses alone; the ranks cannot agree on a stop "
            "any more, so after one the job would resume from its last checkpoint"
        )

    def _send(self, message: Message) -> None:
        """Send now, or once the coordinator is found.

        Raises:
            CoordinatorLost: it is gone, or was never found.
        """
        if self.lost is not None:
            raise self.lost
        channel = self._channel
        if channel is None:
            with self._lock:
                channel = self._channel
                if channel is None:
                    self._unsent.append(message)
                    return
        channel.send(message)

    def _wake(self) -> None:
        if self._channel is not None:
            self._channel.wake()

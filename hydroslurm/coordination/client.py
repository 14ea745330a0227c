"""``CoordinatorClient``: the ranks of one life of a job, as one of them sees them."""

from __future__ import annotations

import itertools
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hydroslurm.coordination.channel import CoordinatorChannel
from hydroslurm.coordination.host import start_hub
from hydroslurm.coordination.messages import MAX_TEXT
from hydroslurm.coordination.pause_barrier import Parking, Tell
from hydroslurm.coordination.questions import Questions
from hydroslurm.coordination.search import find_hub, join_hub
from hydroslurm.coordination.secret import Secret
from hydroslurm.coordination.stop_barrier import Meetings
from hydroslurm.coordination.world import World
from hydroslurm.core.events import EventKind
from hydroslurm.errors import HubLost, NoSecret
from hydroslurm.gate.protocol import Gate, GateEvent

JOIN_S = 600.0
"""How long a rank looks for the others: nodes that boot, containers that are fetched, imports over
a slow file system."""
AGAIN_S = 20.0
"""The same for a hub that follows one that was killed."""


class CoordinatorClient:
    """Connects this rank with the others, in the background; nothing of it slows a step.

    Attributes:
        rank, world_size: as in :class:`World`.
        meetings: where all ranks stop or save; see there.
        lost: why nothing connects the ranks (any more); None while it does, or may yet.
        done: this rank has trained to the end, or stopped with the others; to be set before it
            leaves. One that leaves undone has failed, and the others will not meet it.
        stopping: this rank obeys a stop; to be set before it does. Should the hub be lost now, it
            leaves by itself: it would wait at another one for ranks that have left already.
    """

    def __init__(
        self,
        world: World,
        gate: Gate,
        *,
        secret: Callable[[], Secret],
        tell: Tell,
        wanted: Callable[[str, int, str], None],
        warn: Callable[[str], None],
    ) -> None:
        """
        Args:
            secret: how this rank proves itself; called once, in a thread of ours.
            tell: writes an event of this rank.
            wanted: is told the kind, the rank and the words of a meeting that was called; not in
                the training thread.
            warn: tells a person.
        """
        self.rank = world.rank
        self.world_size = world.world_size
        self.meetings = Meetings()
        self.lost: HubLost | None = None
        self.done = False
        self.stopping = False
        self._world = world
        self._find_secret = secret
        self._secret: Secret | None = None
        self._tell = tell
        self._wanted = wanted
        self._warn = warn
        self._lock = threading.Lock()
        self._questions = Questions(send=self._send, lost=lambda: self.lost)
        self._waiting: list[Any] = []
        self._link: CoordinatorChannel | None = None
        self._everybody = threading.Event()
        self._connected = False
        self._together_by_s = math.inf
        self._stop_words: str | None = None
        self._leaving = False
        self._gone: dict[int, bool] = {}
        self._parking = Parking(gate, send=self._send, tell=tell, wake=self._wake)
        self._began_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="hydroslurm-ranks", daemon=True)

    def start(self) -> None:
        """Begin to look for the others; returns at once."""
        self._thread.start()

    def see(self, event: GateEvent) -> None:
        """The gate has moved; called by the controller."""
        self._parking.see(event)

    @property
    def gone(self) -> Mapping[int, bool]:
        """Ranks that have ended, and whether they died."""
        return dict(self._gone)

    @property
    def have_joined(self) -> bool:
        """Whether all ranks have been there."""
        return self._everybody.is_set()

    def wait_for_all(self, *, timeout_s: float | None = None) -> bool:
        """Whether all ranks have joined, after waiting so long at the most.

        Raises:
            HubLost: they cannot be reached (any more).
        """
        joined = self._everybody.wait(timeout_s)
        if self.lost is not None:
            raise self.lost
        return joined

    # --- agreements
    # --------------------------------------------------------------------------------------------

    def agree(
        self,
        topic: str,
        value: Any,
        *,
        timeout_s: float | None = None,
        cancel: threading.Event | None = None,
        among: Sequence[int] | None = None,
    ) -> Mapping[int, Any]:
        """Hand in a value and get everybody's; see :class:`hydroslurm.checkpoint.peers.Peers`.

        Raises:
            AgreementFailed: a rank has died, left or given up: the same for all.
            HubLost: nothing connects the ranks any more.
            UsageError: this rank waits for that topic already.
        """
        return self._questions.ask(topic, value, timeout_s=timeout_s, cancel=cancel, among=among)

    # --- meetings
    # --------------------------------------------------------------------------------------------

    def call(self, kind: str, words: str = "") -> None:
        """Call a meeting (``stop`` or ``save``): all ranks will hold it at one place.

        Sent when the others can be reached; does nothing where nothing connects them any more.
        """
        if kind == "stop":
            self._stop_words = words
        try:
            self._send({"do": "want", "kind": kind, "words": words[:MAX_TEXT]})
        except HubLost:
            return

    def leave(self) -> None:
        """This rank ends; the others are told whether it is :attr:`done`. May be called twice."""
        self._leaving = True
        try:
            if self._link is not None:
                self._link.send({"do": "bye", "done": self.done})
        except HubLost:
            pass
        if self._link is not None:
            self._link.close()
        self._parking.lose()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        if self._secret is not None:
            self._secret.forget()

    # --- the thread
    # --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Serve one hub after the other: one that is killed is followed by another."""
        world = self._world
        for number in itertools.count(1):
            try:
                self._serve(world, timeout_s=JOIN_S if number == 1 else AGAIN_S)
                return
            except NoSecret as error:
                self._lose(HubLost(str(error)))
                return
            except HubLost as error:
                if not self._may_go_on():
                    self._lose(error)
                    return
                self._interrupt(error)
            except Exception as error:  # nobody waits for what this thread would have told
                self._lose(HubLost(f"{type(error).__name__}: {error}"))
                return
            # other ports and another name: nobody is to meet what is left of the last one
            world = replace(self._world, life=f"{self._world.life} hub {number + 1}")

    def _serve(self, world: World, *, timeout_s: float) -> None:
        if self._secret is None:
            self._secret = self._find_secret()
        secret = self._secret
        first = world.rank == 0
        ports = (start_hub(world, secret),) if first else world.hub_ports(secret.port_key)
        found = find_hub(
            world, secret, ports=ports, timeout_s=timeout_s, stop=lambda: self._leaving
        )
        who = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "cut_off": sorted(self._questions.cut_off),
        }
        link = CoordinatorChannel(
            join_hub(found, world, who), hear=self._hear, due_s=self._due_s, tick=self._tick
        )
        with self._lock:
            self._link, waiting = link, self._waiting
            self._waiting = []
            for message in waiting:
                link.send(message)
        self._parking.catch_up()
        if self._leaving:
            link.close()
        link.run()

    def _due_s(self) -> float | None:
        parking_s = self._parking.due_s
        if self._connected or math.isinf(self._together_by_s):
            return parking_s
        return min(self._together_by_s, math.inf if parking_s is None else parking_s)

    def _tick(self) -> None:
        if not self._connected and time.monotonic() >= self._together_by_s:
            raise HubLost(
                "what connected the ranks of this job is gone, and not all came to another"
            )
        self._parking.tick()

    def _hear(self, message: Any) -> None:
        say = message["say"]
        if say in ("hold", "count", "pass", "all_parked", "release"):
            self._parking.hear(message)
        elif say == "agreed":
            self._questions.agreed(message)
        elif say == "failed":
            self._questions.failed(message)
        elif say == "wanted":
            self._called(message)
        elif say == "meet":
            self._decided(message)
        elif say == "meeting_failed":
            self.meetings.fail(
                message["meeting"],
                missing=tuple(message["missing"]),
                finished=message["finished"],
            )
        elif say == "gone":
            self._gone[message["rank"]] = message["died"]
            if message["died"]:
                self._tell(EventKind.RANK_GONE, {"of_rank": message["rank"]})
        elif say == "everybody":
            took_s = time.monotonic() - self._began_s
            assert self._secret is not None
            self._tell(
                EventKind.RANKS_JOINED,
                {
                    "world_size": self.world_size,
                    "joined_s": took_s,
                    "key_from": self._secret.source,
                },
            )
            self._connected = True
            self._questions.meet(who.get("cut_off", ()) for who in message["ranks"].values())
            self._everybody.set()
            if self._stop_words is not None:
                self.call("stop", self._stop_words)  # the hub that knew of it may be gone

    def _called(self, message: Mapping[str, Any]) -> None:
        kind, of_rank, words = message["kind"], message["of_rank"], message["words"] or ""
        number = message["meeting"]
        place = self.meetings.call(number, kind, of_rank=of_rank, words=words)
        self._send({"do": "promise", "meeting": number, "place": place})
        self._wanted(kind, of_rank, words)

    def _decided(self, message: Mapping[str, Any]) -> None:
        meeting = self.meetings.decide(message["meeting"], message["place"])
        if meeting is not None and meeting.kind == "stop":
            self._tell(
                EventKind.STOP_AGREED,
                {
                    "of_rank": meeting.of_rank,
                    "signal": meeting.words or None,
                    "promised_place": meeting.promise,
                    "place": meeting.place,
                },
            )

    def _may_go_on(self) -> bool:
        """Whether all ranks can come together at another hub: they were all at this one, and none
        has ended or is about to."""
        about_to_end = self._leaving or self.stopping
        return self._connected and not self._gone and not about_to_end

    def _interrupt(self, error: HubLost) -> None:
        """Between two hubs nothing is decided: what was being asked fails."""
        with self._lock:
            self._link = None
            self._waiting = []
        self._connected = False
        self._together_by_s = time.monotonic() + AGAIN_S
        self._parking.lose()
        self.meetings.forget()
        self._questions.interrupt(error)
        self._tell(EventKind.HUB_LOST, {"words": str(error)})
        if self.rank == 0:
            self._warn(f"{error}; it is started again. A save in progress has failed by it")

    def _lose(self, error: HubLost) -> None:
        if self._leaving or self.lost is not None:
            return
        self.lost = error
        self._parking.lose()
        self.meetings.lose(error)
        self._questions.fail(error)
        self._everybody.set()
        self._tell(EventKind.AGREEMENT_FAILED, {"what": "connection", "words": str(error)})
        self._warn(
            f"{error}. This rank trains on, and pauses alone; a stop cannot be agreed on any more, "
            "so that the job would go on from its last checkpoint"
        )

    def _send(self, message: Any) -> None:
        """Now, or when the hub is found.

        Raises:
            HubLost: it is gone, or was never found.
        """
        if self.lost is not None:
            raise self.lost
        link = self._link
        if link is None:
            with self._lock:
                link = self._link
                if link is None:
                    self._waiting.append(message)
                    return
        link.send(message)

    def _wake(self) -> None:
        if self._link is not None:
            self._link.wake()

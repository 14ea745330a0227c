"""The coordinator of an elastic run: a process that is not a member.

It needs one core, a few megabytes and no torch. While it is gone, members train on; they wait for
it only during a change. The ledger holds its whole state: after a kill, a time limit or a move to
another node, a new coordinator reads it, listens at a new address, and the members reconnect.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hydroslurm.coordination.authentication import unpack
from hydroslurm.coordination.messages import BadMessage, Message
from hydroslurm.coordination.network import allow_descriptors, listen, own_address
from hydroslurm.coordination.server import (
    MAX_UNAUTHENTICATED,
    SPARE_DESCRIPTORS,
    PeerConnection,
    Server,
)
from hydroslurm.core.fence import Fence
from hydroslurm.core.threads import say
from hydroslurm.elastic.autoscale import Autoscaler
from hydroslurm.elastic.folder import CoordinatorOptions, ElasticFolder
from hydroslurm.elastic.membership import Membership
from hydroslurm.elastic.messages import check_from_rank
from hydroslurm.elastic.roster import (
    MEETING_S,
    Action,
    Close,
    Rank,
    Record,
    Refused,
    Send,
    Size,
)

STATUS_S = 1.0
"""Interval of status writes while nothing changes."""
ALIVE_S = 5.0
"""Interval of the messages that show ranks their coordinator is alive."""
MOST_RANKS = 16384
CHANGES_PER_EPOCH = 1_000_000
"""Offset of each coordinator's change numbers, so that no number repeats."""
FINISHED_LINGER_S = 10.0
"""How long ranks that missed the end of the run may still ask."""

EVENTS: Mapping[str, Callable[..., list[Action]]] = {
    "ready": Membership.ready,
    "propose": Membership.proposed,
    "arrived": Membership.arrived,
    "failed": Membership.failed,
    "resumed": Membership.resumed,
    "saved": Membership.saved,
    "formed": Membership.formed,
    "leave": Membership.leave,
}
"""Handlers of joined ranks' messages, by ``type``; the message fields are the arguments."""
TOLD_BY_BEATS = ("step", "waits", "paused", "collectives", "meeting_s", "ended")
"""Beat fields for the membership."""
Observer = Callable[[str, Message], None]


class Coordinator(Server):
    """A :class:`Membership` behind sockets, with its ledger and status.

    Attributes:
        membership: who trains together.
        observers: called with the kind and data of each ledger line, once written.
        on_tick: called about once a second.
        beats: each rank's latest report of its pace, and its node's and device's utilization.
    """

    def __init__(
        self,
        listener: socket.socket,
        folder: ElasticFolder,
        membership: Membership,
        *,
        fence: Fence,
        epoch: int,
    ) -> None:
        super().__init__(listener, key=folder.key())
        self.membership = membership
        self.observers: list[Observer] = []
        self.on_tick: list[Callable[[float], None]] = []
        self._folder = folder
        self._fence = fence
        self._epoch = epoch
        self._address = listener.getsockname()
        self._peers: dict[Rank, PeerConnection] = {}
        self._ranks: dict[PeerConnection, Rank] = {}
        self.beats: dict[Rank, Message] = {}
        self._store: dict[str, str] = {}
        self._waiting: list[tuple[PeerConnection, int, list[str]]] = []
        self._said: set[str] = set()  # members that have published their addresses
        self._meet_until_s = 0.0
        self._heard_until_s = self.clock.now_s()
        self._absences = 0
        self._status_due_s = self._alive_due_s = 0.0
        self._status_failed = False
        self._end_s: float | None = None
        self._is_ending = False

    def run(self) -> None:
        """Serve until the run has finished and its ranks have gone.

        Raises:
            StaleAttempt: a newer coordinator has taken over.
        """
        while self._end_s is None or (self._peers and self.clock.now_s() < self._end_s):
            self.serve_once()
        self._write_status()
        self._is_ending = True  # the members live on, and look for the next coordinator
        self.close()

    def end_within(self, seconds: float) -> None:
        """Serve at most this much longer, and only while there are members."""
        self._end_s = self.clock.now_s() + seconds

    def timeout_s(self) -> float:
        self._heard_until_s = self.clock.now_s()
        due_s = min(self.membership.due_s(), self._status_due_s)
        return max(0.0, min(super().timeout_s(), due_s - self._heard_until_s))

    def on_round(self) -> None:
        # not the current time: if this process was stopped after it polled the sockets, they
        # hold what arrived since
        now_s = self._heard_until_s
        if self._absences != self.clock.absences:
            self._absences = self.clock.absences
            self.membership.restart_clocks(self.clock.now_s())
        if now_s >= self.membership.due_s():
            self.act(self.membership.tick(now_s))
        if now_s >= self._status_due_s:
            self._status_due_s = now_s + STATUS_S
            self.act(self.membership.tick(now_s))
            for call in self.on_tick:
                call(now_s)
            self._write_status()
        if now_s >= self._alive_due_s:
            self._alive_due_s = now_s + ALIVE_S
            self.send({"type": "alive"}, self._peers.values())

    # --- messages

    def on_fault(self, peer: PeerConnection) -> None:
        """Report a fault of ours; the rank has not failed."""
        traceback.print_exc()
        summary = traceback.format_exception_only(*sys.exc_info()[:2])[-1].strip()
        self._forget(peer, fault=f"a fault of the coordinator's own: {summary}")

    def on_body(self, peer: PeerConnection, body: bytes) -> None:
        message = check_from_rank(unpack(body))
        kind, now_s = message["type"], self.clock.now_s()
        if kind == "scale":
            self._answer_controller(peer, message, now_s)
            return
        rank = self._ranks.get(peer)
        if rank is None:
            self._join(peer, message, now_s)
        elif kind == "beat":
            self.beats[rank] = message
            fields = {name: message[name] for name in TOLD_BY_BEATS}
            self.act(self.membership.beat(rank, now_s=now_s, **fields))
        elif kind == "done":
            self.act(self.membership.done(rank, now_s))
            value = int(self.membership.finished)
            self.send({"type": "added", "id": message["id"], "value": value}, [peer])
        elif kind in ("set", "get", "add"):
            self._serve_store(peer, message)
        elif kind in EVENTS:
            fields = {name: message[name] for name in message if name != "type"}
            if kind == "formed" and not message["ok"] and now_s >= self._meet_until_s:
                fields["missing"] = self._missing()
            self.act(EVENTS[kind](self.membership, rank, now_s=now_s, **fields))
        else:
            raise BadMessage(f"{kind} of a rank that has joined")

    def _join(self, peer: PeerConnection, message: Message, now_s: float) -> None:
        if message["type"] != "join":
            raise BadMessage("the first message is join")
        rank = (message["member"], message["local_rank"])
        self.admit(peer)
        before, self._peers[rank] = self._peers.get(rank), peer
        try:
            if len(self._peers) > MOST_RANKS:
                raise Refused(f"{MOST_RANKS} ranks are the most")
            names = ("local_size", "node", "generation", "holding")
            fields = {name: message[name] for name in names}
            actions = self.membership.join(rank, now_s=now_s, **fields)
        except Refused as refusal:
            if before is not None:
                self._peers[rank] = before
            else:
                del self._peers[rank]
            self.send({"type": "refused", "reason": str(refusal), "again": refusal.again}, [peer])
            return
        self._ranks[peer] = rank
        self.act(actions)

    def _answer_controller(self, peer: PeerConnection, message: Message, now_s: float) -> None:
        self.admit(peer)
        ok, text = True, ""
        try:
            actions = self.membership.scale(
                message["size"], message["leave"], now_s, by=message["by"]
            )
            self.act(actions)
            text = f"{message['size']} members are wanted"
        except ValueError as error:
            ok, text = False, str(error)
        self.send({"type": "answer", "ok": ok, "message": text, "status": self.status()}, [peer])

    def on_drop(self, peer: PeerConnection) -> None:
        self._forget(peer)

    def _forget(self, peer: PeerConnection, *, fault: str = "") -> None:
        self._waiting = [request for request in self._waiting if request[0] is not peer]
        rank = self._ranks.pop(peer, None)
        if rank is not None and self._peers.get(rank) is peer and not self._is_ending:
            del self._peers[rank]
            self.beats.pop(rank, None)
            self.act(self.membership.lost(rank, self.clock.now_s(), fault=fault))

    # --- the store by which process groups meet

    def _serve_store(self, peer: PeerConnection, message: Message) -> None:
        kind = message["type"]
        if kind == "set":
            if len(self._store) > 16 * MOST_RANKS:
                raise BadMessage("the store is full")
            self._store[message["key"]] = message["value"]
            self._said.add(self._ranks[peer][0])
            self._answer_waiting()
        elif kind == "add":
            value = int(self._store.get(message["key"], "0")) + message["amount"]
            self._store[message["key"]] = str(value)
            self.send({"type": "added", "id": message["id"], "value": value}, [peer])
            self._answer_waiting()
        else:
            self._waiting.append((peer, message["id"], message["keys"]))
            self._answer_waiting()

    def _missing(self) -> list[str]:
        """Members that never published their addresses; for agents only the first one has to."""
        members = self.membership.current[: 1 if self.membership.are_agents else None]
        return [name for name in members if name not in self._said]

    def _answer_waiting(self) -> None:
        still = []
        for peer, number, keys in self._waiting:
            values = [self._store.get(key) for key in keys]
            if None in values:
                still.append((peer, number, keys))
            else:
                self.send({"type": "values", "id": number, "values": values}, [peer])
        self._waiting = still

    # --- actions

    def act(self, actions: Iterable[Action]) -> None:
        """Carry out the membership's decisions."""
        for action in actions:
            if isinstance(action, Record):
                self._record(action)
                if action.kind == "forming":
                    self._store.clear()  # the previous generation's addresses
                    self._waiting, self._said = [], set()
                    self._meet_until_s = self.clock.now_s() + MEETING_S / 2
                elif action.kind in ("finished", "gave_up"):
                    self.end_within(FINISHED_LINGER_S)
                for observer in self.observers:
                    observer(action.kind, action.data)
                self._status_due_s = 0.0
            elif isinstance(action, Send):
                peer = self._peers.get(action.to)
                if peer is not None:
                    self.send(action.message, [peer])
            elif isinstance(action, Close):
                peer = self._peers.get(action.rank)
                if peer is not None:
                    self._ranks.pop(peer, None)
                    del self._peers[action.rank]
                    self.drop(peer)

    def _record(self, action: Record) -> None:
        """Write a change down before anyone learns of it. A full disk blocks this until there is
        room; the members train on meanwhile."""
        has_waited = False
        while True:
            try:
                self._fence.check("a change of this run")
                return self._folder.record(action.kind, action.data)
            except OSError as error:
                if not has_waited:
                    sys.stderr.write(f"hydroslurm: no change of this run can be made: {error}\n")
                has_waited = True
            time.sleep(STATUS_S)

    # --- the status

    def status(self) -> dict[str, Any]:
        """Return the run's status as in ``status.json``; durations in s, moments since 1970."""
        membership = self.membership
        now_s, now_epoch_s = self.clock.now_s(), time.time()
        beats = self.beats.values()
        return {
            "generation": membership.generation,
            "state": membership.state,
            "step": membership.step,
            "engine": "restart" if membership.are_agents else "in_place",
            "size": len(membership.current),
            "wanted": membership.size.wanted,
            "min": membership.size.min,
            "max": membership.size.max,
            "spares": membership.size.spares,
            "step_s": max((beat["step_s"] for beat in beats), default=0.0),
            "samples_per_s": sum(beat["samples_per_s"] for beat in beats),
            "members": [
                {
                    "id": member.id,
                    "node": member.node,
                    "state": membership.state_of(member),
                    "ranks": member.local_size * membership.ranks_each,
                    "since_epoch_s": round(now_epoch_s - (now_s - member.since_s), 3),
                    "reason": member.leaving[:400] or ("the others wait" if member.paused else ""),
                }
                for member in sorted(membership.members.values(), key=lambda m: m.order)
            ],
            "coordinator": self._own(),
            "written_epoch_s": now_epoch_s,
        }

    def announce(self) -> None:
        """Publish this coordinator's address."""
        self._folder.write(self._folder.coordinator_json, self._own())

    def _own(self) -> dict[str, Any]:
        return {
            "host": self._address[0],
            "port": self._address[1],
            "pid": os.getpid(),
            "node": socket.gethostname(),
            "job_id": int(os.environ.get("SLURM_JOB_ID", 0) or 0),
            "epoch": self._epoch,
        }

    def _write_status(self) -> None:
        """Write the status; a full disk or an unreadable claim must not end the run, since the next
        write may succeed."""
        try:
            self._fence.check("the status of this run")
            self._folder.write(self._folder.status_json, self.status())
        except OSError as error:
            if not self._status_failed:
                say(f"the status cannot be written: {error}")
            self._status_failed = True
        else:
            self._status_failed = False


def restored(
    folder: ElasticFolder, options: CoordinatorOptions, now_s: float
) -> tuple[Membership, int]:
    """Restore the membership from the ledger; also return this coordinator's number, from 1."""
    forming: Message = {}
    trained: Message | None = None
    done: list[Rank] = []
    failed: list[str] = []
    size, epoch, finished = options.size, 1, False
    for entry in folder.ledger():
        kind = entry["kind"]
        if kind == "forming":
            forming, trained = entry, None
        elif kind == "trained":
            trained, done, failed = entry, [], []
        elif kind == "done":
            done.append((entry["member"], entry["local_rank"]))
        elif kind in ("left", "failure") and trained is not None:
            failed.append(entry["member"])
        elif kind == "wanted" and size.min <= int(entry["size"]) <= size.max:
            size = Size(min=size.min, max=size.max, wanted=int(entry["size"]), spares=size.spares)
        elif kind == "coordinator":
            epoch = int(entry["epoch"]) + 1
        elif kind in ("left", "failure") and forming:
            members = [m for m in forming["members"] if m[0] != entry["member"]]
            forming = {**forming, "members": members}
        elif kind == "finished":
            finished = True
    membership = Membership(
        size,
        options.timing,
        generation=int(forming.get("generation", 0)),
        current=[(str(name), int(ranks)) for name, ranks in forming.get("members", ())],
        change=epoch * CHANGES_PER_EPOCH,
        now_s=now_s,
    )
    membership.finished = finished
    membership.ranks_each = options.ranks_each
    membership.are_agents = options.engine == "restart"
    if trained is not None and not finished:
        membership.resume_tail(trained["step"], done=done, failed=failed)
    return membership, epoch


def start(folder: ElasticFolder) -> Coordinator:
    """Take over the run, listen, and publish the address.

    Raises:
        UsageError: ``options.json`` is missing or invalid.
        RunFolderError, UntrustedFile: the folder is unusable.
        OSError: it cannot listen.
    """
    options = folder.options()
    folder.make_key()
    fence = Fence(
        folder.claim_json,
        cluster=os.environ.get("SLURM_CLUSTER_NAME", ""),
        job_id=int(os.environ.get("SLURM_JOB_ID", 0) or 0),
        restart_count=int(os.environ.get("SLURM_RESTART_COUNT", 0) or 0),
    )
    fence.hold(fence.claim())
    allow_descriptors(MOST_RANKS + MAX_UNAUTHENTICATED + SPARE_DESCRIPTORS)
    membership, epoch = restored(folder, options, time.monotonic())
    listener = listen(own_address(os.environ), [0])
    coordinator = Coordinator(listener, folder, membership, fence=fence, epoch=epoch)
    if options.autoscale is not None:
        coordinator.on_tick.append(Autoscaler(folder, options.autoscale, coordinator).tick)
    coordinator.act([Record("coordinator", {"epoch": epoch, "pid": os.getpid()})])
    coordinator.announce()
    return coordinator

"""One rank's connection to the coordinator of its elastic run.

A separate thread receives, so that a rank can be reached while it trains. That thread imports
nothing and takes no lock of the training. The training thread reads one attribute at each safe
point, and takes the slow path only when needed.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hydroslurm.coordination.channel import (
    CONNECT_S,
    Connection,
    CoordinatorChannel,
    ask_first,
    connect,
)
from hydroslurm.coordination.messages import Message
from hydroslurm.coordination.secret import Secret
from hydroslurm.coordination.world import World
from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.core.threads import thread
from hydroslurm.elastic.autoscale import Usage
from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.elastic.messages import check_from_coordinator
from hydroslurm.elastic.roster import Average, Awaited, Depart, Directive, Finished, Form, Save
from hydroslurm.errors import CoordinatorLost, HydroslurmError

BEAT_S = 1.0
AWAITED_S = 10.0
"""How long an ``awaited`` message is valid; the coordinator repeats it every second."""
RETRY_S = 0.5
LOOK_AFTER_S = 8.0
"""After so long a silence, check whether another coordinator has taken over without the old one
knowing. Shorter than a new one waits for its ranks, longer than its ``alive`` interval."""
TOLD_AFTER_S = 60.0
MOST_ERROR = 500
"""Characters of an error sent to the coordinator."""
GOODBYE_S = 60.0
"""How long an ending process waits for a coordinator that could take note of it."""
STORE_S = 120.0
"""How long a rank waits for another in a group that the script makes."""


class Member:
    """Connects one rank to the coordinator.

    Attributes:
        name, local_rank, local_size: which rank of which member.
        generation: the current one; 0 before the first.
        broken: this generation cannot go on; the current step does not count.
        has_state: this rank has the run's state and can give it to others.
        culprit: member with the first failure when a generation was last broken.
    """

    def __init__(
        self,
        folder: ElasticFolder,
        *,
        name: str,
        local_rank: int = 0,
        local_size: int = 1,
        node: str = "",
        on_abort: Callable[[Depart | None], None] = lambda _: None,
        stop: Callable[[], bool] = lambda: False,
        waits: Callable[[], bool] = lambda: False,
        is_paused: Callable[[], bool] = lambda: False,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        """
        Args:
            on_abort: makes collectives fail that wait for a lost rank; called in this object's
                thread, with the order to leave if the others went on without this rank.
            stop: whether this rank is to stop; then it announces that it leaves, also while it
                waits for a directive.
            waits: whether this rank has done its part of the current step.
            is_paused: whether it is paused on purpose.
            warn: shows the user a warning.
        """
        self.name = name
        self.local_rank = local_rank
        self.local_size = local_size
        self.generation = 0
        self.broken = False
        self.has_state = False
        self.culprit = ""
        self._folder = folder
        self._node = node or socket.gethostname()
        self._on_abort = on_abort
        self._stop, self._waits, self._is_paused = stop, waits, is_paused
        self._warn = warn
        self._cond = threading.Condition()
        self._step = 0
        self._attention = False
        self._called: int | None = None
        self._hold_at: int | None = None
        self._change = 0
        self._holding: tuple[int, bool, bool] | None = None
        self._directives: deque[Directive] = deque()
        self._ready = False
        self._is_trained = self._all_done = False
        self._leaving = ""
        self._failure: Message | None = None
        self._aborted_for = 0
        self._pace = (0.0, 0.0)
        self._progress: Message = {"collectives": None, "meeting_s": 0.0, "ended": False}
        self._are_paused = False
        self._awaited = (0, Awaited(), 0.0)
        self._ids = itertools.count(1)
        self._answers: dict[int, Any] = {}
        self._channel: CoordinatorChannel | None = None
        self._closed = False
        self._lost = ""
        self._heard_s = time.monotonic()
        self._clock = AwakeClock(2 * CONNECT_S)  # of the thread
        self._alone_since_s = self._clock.now_s()
        self._place: Message | None = None
        self._beat_due_s = 0.0
        self._usage = Usage()
        self._thread = thread(self._run, name="hydroslurm-elastic")

    def start(self) -> None:
        """Start connecting to the coordinator; return at once."""
        self._thread.start()

    def close(self) -> None:
        """End the connection."""
        self._closed = True
        with self._cond:
            channel = self._channel
            self._cond.notify_all()
        if channel is not None:
            channel.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    # --- the training thread
    # --------------------------------------------------------------------------------------------

    def begin(self) -> Directive:
        """Wait for the first generation; this rank is ready but for the run's state."""
        with self._cond:
            self._ready = True
        self._tell({"type": "ready"})
        return self.again()

    def safe_point(
        self,
        step: int,
        *,
        failed: bool = False,
        final: bool = False,
        equal: bool = True,
        holds_if_broken: bool = True,
    ) -> Directive | Average | None:
        """Report that a step is done. Returns None to go on, after one comparison.

        Args:
            failed: the next step was begun, and dropped.
            final: there is nothing more to train.
            equal: this rank's weights equal the others'; otherwise they are averaged before members
                change.
            holds_if_broken: False if other ranks of this member wait for this one within their step
                and may not know yet that the generation is broken; go on until they all do.
        """
        self._step = step  # before reading the flag: a hold that arrives now names the next step
        if not (self._attention or failed or final):
            return None
        with self._cond:
            while not (failed or final or self.broken or self._directives):
                if self._called is None:
                    self._attention = False
                    return None
                if self._hold_at is not None:
                    if step < self._hold_at:
                        return None
                    break
                self._cond.wait(0.5)
            if self.broken and not (holds_if_broken or failed or final):
                return None
            if not (equal or failed or final or self.broken or self._directives):
                return Average()
            self._holding = (step, failed, final)
        self._arrive()
        return self.again()

    def again(self) -> Directive:
        """Wait for the next directive; call it again after a save, or a generation that could not
        meet."""
        while True:
            with self._cond:
                if self._directives:
                    directive = self._directives.popleft()
                    if isinstance(directive, Form):
                        self._take(directive)
                    return directive
                if self._closed:
                    return Depart("this rank is closed")
                self._cond.wait(0.2)
            if self._stop():
                self.leave("a stop was requested")

    def fail(self, reason: str = "", *, met: bool = True, lost_peer: bool = False) -> None:
        """Report from any thread that a collective failed in this rank or, with ``reason``, one
        of its processes did. ``met``: they had met the others' processes. ``lost_peer``: the cause
        is probably elsewhere. After another rank's report only a process that could not meet is
        still reported."""
        with self._cond:
            if self.broken and met:
                return
            self.broken = self._attention = True
            details = {"reason": reason[:MOST_ERROR], "met": met, "lost_peer": lost_peer}
            self._failure = {"type": "failed", "generation": self.generation, **details}
            failure = self._failure
        self._tell(failure)

    # --- for an agent, which starts new processes in each generation

    @property
    def is_called(self) -> bool:
        """Whether this generation's processes should stop together and save."""
        return self._called is not None and not self.broken

    @property
    def is_dismissed(self) -> bool:
        """Whether this member has to leave the run."""
        return any(isinstance(directive, Depart) for directive in tuple(self._directives))

    @property
    def awaited(self) -> Awaited:
        """What other processes of this generation wait for, by the coordinator's latest message."""
        generation, awaited, told_s = self._awaited
        is_new = time.monotonic() - told_s < AWAITED_S
        return awaited if is_new and generation == self.generation else Awaited()

    def note_progress(
        self,
        step: int | None,
        collectives: int | None,
        *,
        meeting_s: float = 0.0,
        ended: bool = False,
        paused: bool = False,
    ) -> None:
        """Set what the next beat reports; as :meth:`Liveness.progress`. ``paused``: a process is
        paused on purpose."""
        self._are_paused = paused
        self._progress = {"collectives": collectives, "meeting_s": meeting_s, "ended": ended}
        if step is not None:
            self._step = step

    def blame(self, reason: str, *, met: bool = True, lost_peer: bool = False) -> str:
        """Report how a process of this member ended. Return the member whose process ended first;
        "" if that one is gone, or if they had not ``met``."""
        self.fail(reason, met=met, lost_peer=lost_peer)
        with self._cond:
            while self._aborted_for != self.generation and not (self._closed or self.is_dismissed):
                self._cond.wait(0.5)
            return self.culprit

    def hold(self, *, failed: bool = False, final: bool = False) -> Directive:
        """Report that this generation's processes have ended; arguments as :meth:`safe_point`."""
        with self._cond:
            self._holding = (self._step, failed, final)
        self._arrive()
        return self.again()

    def resumed(self, step: int) -> None:
        """Report that the processes started for this generation train on after this step."""
        self._tell({"type": "resumed", "generation": self.generation, "step": step})

    def formed(self, form: Form, *, ok: bool, error: str = "", step: int | None = None) -> None:
        """Report that the generation has met and trains on after this step (None: unknown), or that
        it has not; then wait for the next directive."""
        pause_s = time.monotonic() - form.since_s
        if ok:
            with self._cond:
                self._holding, self.has_state = None, True
        details = {"ok": ok, "pause_s": pause_s, "error": error[:MOST_ERROR], "step": step}
        self._tell({"type": "formed", "change": form.change, **details})

    def saved(self, save: Save) -> None:
        """Report that the requested save is made, or impossible."""
        self._tell({"type": "saved", "change": save.change})

    def leave(self, reason: str) -> None:
        """Announce that this member has to go; repeated to a new coordinator."""
        if self._leaving:
            return
        self._leaving = reason
        self._tell({"type": "leave", "reason": reason})

    def note_pace(self, step_s: float, samples_per_s: float) -> None:
        """Set the pace that the next beat reports."""
        self._pace = (step_s, samples_per_s)

    def done(self, *, of_all: bool = False) -> bool:
        """Report that this process has done what follows the training and ends well. Wait until the
        coordinator confirms it or, with ``of_all``, until all ranks have reported; return if it
        did."""
        until_s = time.monotonic() + GOODBYE_S
        while not (self._all_done or self.broken) and time.monotonic() < until_s:
            try:
                self._all_done = bool(self._ask({"type": "done"}, GOODBYE_S))
            except CoordinatorLost:
                self._all_done = self._state_of_run() == "Succeeded"
                if self._closed:
                    break
            else:
                until_s = time.monotonic() + GOODBYE_S
                if not of_all:
                    return True
            time.sleep(RETRY_S)
        return self._all_done

    # --- the store by which a process group meets

    def set_value(self, key: str, value: bytes) -> None:
        """Set a value for all ranks of the generation that is forming."""
        self._tell({"type": "set", "key": key, "value": base64.b64encode(value).decode()})

    def get_values(self, keys: Sequence[str], *, timeout_s: float = STORE_S) -> list[bytes]:
        """Wait for values.

        Raises:
            CoordinatorLost: they did not arrive, or the generation was given up.
        """
        texts = self._ask({"type": "get", "keys": list(keys)}, timeout_s)
        return [base64.b64decode(text) for text in texts]

    def add_value(self, key: str, amount: int) -> int:
        """Add to a counter; raises as :meth:`get_values`."""
        return int(self._ask({"type": "add", "key": key, "amount": amount}, STORE_S))

    def _ask(self, message: Message, timeout_s: float) -> Any:
        number, clock = next(self._ids), AwakeClock()
        deadline_s = clock.now_s() + timeout_s
        self._tell({**message, "id": number})
        with self._cond:
            while number not in self._answers:
                left_s = deadline_s - clock.now_s()
                # do not compare the change: one aborted before this call would keep it waiting,
                # and one only called for does not affect it
                if left_s <= 0 or self._closed or self.broken or self._channel is None:
                    raise CoordinatorLost("the ranks of the new generation did not all come")
                self._cond.wait(min(left_s, 1.0))
            return self._answers.pop(number)

    # --- inside
    # --------------------------------------------------------------------------------------------

    def _take(self, form: Form) -> None:
        """Enter this generation."""
        self.generation, self._change = form.generation, form.change
        self.broken, self._attention = False, bool(self._directives)
        self._failure = None
        self._called = self._hold_at = None
        if self._holding is None:
            self._holding = (self._step, False, False)

    def _arrive(self) -> None:
        with self._cond:
            holding, change = self._holding, self._change
        if holding is not None:
            step, failed, final = holding
            self._tell(
                {
                    "type": "arrived",
                    "change": change if self._called is not None or self.broken else 0,
                    "step": step,
                    "has_state": self.has_state,
                    "failed": failed,
                    "final": final,
                }
            )

    def _tell(self, message: Message) -> None:
        """Send; the next coordinator gets again what a lost connection swallows."""
        with self._cond:
            channel = self._channel
        if channel is not None:
            with contextlib.suppress(CoordinatorLost):
                channel.send(message)

    # --- the thread

    def _run(self) -> None:
        while not self._closed:
            try:
                self._serve()
            except Exception as error:  # any error: connect again
                self._lost = str(error) or repr(error)
            with self._cond:
                self._channel = None
                self._cond.notify_all()
            self._look_for_end()
            time.sleep(RETRY_S)

    def _look_for_end(self) -> None:
        """Check the status file: maybe no coordinator is left to say that the run has ended."""
        state = self._state_of_run()
        if state == "Failed" and self.generation:
            self._leave_now(Depart("the run has failed without it", failed=True))
        elif state == "Succeeded":
            is_final = self._holding is not None and self._holding[2]
            if self.generation and not (self._is_trained or is_final):
                self._leave_now(Depart("the run has finished without it"))
            else:
                self._put(Finished())
                self._closed = True
        elif self._clock.now_s() - self._alone_since_s > TOLD_AFTER_S:
            self._alone_since_s = math.inf
            self._warn(
                f"the coordinator of this run has not answered for {TOLD_AFTER_S:g} s "
                f"({self._lost or 'nobody listens'}); this member trains on, and changes nothing "
                "until it is back. Is its job running?"
            )

    def _state_of_run(self) -> object:
        return (self._folder.read(self._folder.status_json) or {}).get("state")

    def _serve(self) -> None:
        connection = self._connect()
        if connection is None:
            return
        channel = CoordinatorChannel(
            connection,
            on_message=self._on_message,
            due_s=lambda: self._beat_due_s,
            tick=self._beat,
            check=check_from_coordinator,
        )
        with self._cond:
            self._channel, self._heard_s = channel, time.monotonic()
        if self._ready and not self.generation:
            self._tell({"type": "ready"})
        if self._leaving:
            self._tell({"type": "leave", "reason": self._leaving})
        if self._failure is not None:
            self._tell(self._failure)
        if self._holding is not None and self._holding[2]:
            self._arrive()  # it trains no more, so no message would ask for it
        if self._closed:
            channel.close()
        try:
            channel.run()
        finally:
            self._alone_since_s = self._clock.now_s()

    def _connect(self) -> Connection | None:
        place = self._place = self._folder.read(self._folder.coordinator_json)
        if place is None:
            return None
        secret = Secret("file", self._folder.key())
        connection = connect([(str(place.get("host")), int(place.get("port", 0)))], World(), secret)
        if isinstance(connection, str):
            self._lost = connection
            return None
        hello = {
            "type": "join",
            "member": self.name,
            "local_rank": self.local_rank,
            "local_size": self.local_size,
            "node": self._node,
            "generation": self.generation,
            "holding": self._holding is not None,
        }
        first, joined = ask_first(connection, hello, check=check_from_coordinator)
        if first["type"] != "welcome":
            joined.socket.close()
            if first["type"] == "refused" and not first["again"]:
                self._leave_now(Depart(first["reason"], again=True))
            return None
        return joined

    def _beat(self) -> None:
        now_s = time.monotonic()
        self._beat_due_s = now_s + BEAT_S
        if now_s - self._heard_s > LOOK_AFTER_S:
            if self._is_replaced():
                raise CoordinatorLost("another one has taken over")
            return  # it is stopped, and beats that it does not read would end the connection
        step_s, samples_per_s = self._pace
        paused = self._is_paused() or self._are_paused
        self._tell(
            {
                "type": "beat",
                "step": self._step,
                "waits": paused or self._waits() or self._holding is not None,
                "paused": paused,
                "step_s": step_s,
                "samples_per_s": samples_per_s,
                "use": self._usage.read(),
                **self._progress,
            }
        )

    def _is_replaced(self) -> bool:
        """Whether another coordinator has taken over from the one this rank talks to."""
        with contextlib.suppress(HydroslurmError, OSError):
            return self._folder.read(self._folder.coordinator_json) not in (None, self._place)
        return False

    def _on_message(self, message: Message) -> None:
        kind, self._heard_s = message["type"], time.monotonic()
        if kind == "hold":
            with self._cond:
                self._change = self._called = message["change"]
                self._hold_at = None
                self._attention = True  # before reading the step; see safe_point()
                proposal = self._step + (0 if self._holding is not None else 1)
            self._tell({"type": "propose", "change": message["change"], "step": proposal})
        elif kind == "hold_at":
            with self._cond:
                if self._called == message["change"]:
                    self._hold_at = message["step"]
                    self._cond.notify_all()
        elif kind == "abort":
            self._abort(message)
        elif kind == "form":
            fields = {name: message[name] for name in message if name != "type"}
            self._put(Form(**{**fields, "needs": tuple(fields["needs"])}))
        elif kind == "awaited":
            names = ("collectives", "meeting_s", "ended")
            awaited = Awaited(**{name: message[name] for name in names})
            self._awaited = (message["generation"], awaited, time.monotonic())
        elif kind == "save":
            self._put(Save(message["change"]))
        elif kind == "depart":
            self._put(Depart(message["reason"], failed=message["failed"]))
        elif kind in ("trained", "finished"):
            with self._cond:
                self._holding, self._is_trained = None, True
            self._put(Finished())
        elif kind == "paused":
            self._warn(
                f"member {message['member']} on {message['node'] or '?'} is paused: the others "
                "wait for it until it is continued, or leaves"
            )
        elif kind == "wait":
            self._warn("too few members are left; this run waits for more, where it is")
        elif kind in ("values", "added"):
            with self._cond:
                self._answers[message["id"]] = message.get("values", message.get("value"))
                self._cond.notify_all()

    def _abort(self, message: Message) -> None:
        with self._cond:
            self._change = self._called = message["change"]
            self._hold_at = None
            held = self._holding is not None
            self.broken = self._attention = True
            self.culprit, self._aborted_for = message["culprit"], self.generation
            self._directives = deque(d for d in self._directives if not isinstance(d, (Form, Save)))
            self._cond.notify_all()
        if held:
            self._arrive()
        self._on_abort(None)

    def _leave_now(self, depart: Depart) -> None:
        """Leave: the others have gone on without this rank, whose collectives may await them."""
        self._put(depart)
        self._closed = True
        if not self._is_trained:
            self._on_abort(depart)

    def _put(self, directive: Directive) -> None:
        with self._cond:
            self._directives.append(directive)
            self._attention = True
            self._cond.notify_all()

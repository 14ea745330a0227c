"""The rank's state machine seen from Python: RUNNING -> PARKING -> PARKED -> RUNNING, RUNNING ->
STOPPING.

The gate decides and holds; it needs neither Python nor the GIL. The controller is what else belongs
to a pause: a thread that reads what the gate saw, writes it down as events, drains the devices, and
answers ``pause(wait_s=...)``.

Nothing may be imported, and no lock of another thread's taken, in the controller's thread while a
pause is in force: the thread that holds the lock may be parked with it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydroslurm.coordination import collectives
from hydroslurm.coordination.world import World
from hydroslurm.core.events import EventKind, clocks
from hydroslurm.core.proc import boot_id
from hydroslurm.core.rundir import GENERATION_ENV
from hydroslurm.core.signals import signal_name
from hydroslurm.core.threads import say, thread
from hydroslurm.errors import AckTimeout, HydroslurmError, InstallError
from hydroslurm.gate.handlers import CHECK_S, Guard
from hydroslurm.gate.marks import Emit, Range
from hydroslurm.gate.native_gate import NativeGate
from hydroslurm.gate.protocol import (
    Action,
    Cause,
    GateEvent,
    GateState,
    GateStatus,
    SignalOutcome,
)
from hydroslurm.gate.signals import SignalPlan
from hydroslurm.runtime import device
from hydroslurm.runtime.children import Children
from hydroslurm.runtime.device import Drain, LaunchAhead, launch_ahead_from
from hydroslurm.runtime.journal import RankJournal, Recorder
from hydroslurm.runtime.output import Output
from hydroslurm.runtime.standing import Watch
from hydroslurm.runtime.vacating import Vacating

if TYPE_CHECKING:
    from hydroslurm.coordination.client import CoordinatorClient
    from hydroslurm.coordination.secret import Secret
    from hydroslurm.gate import Gate

MOST_ERROR = 300
"""Characters of the error by which a script has ended."""
_LEAVE_S = 10.0
"""How long to wait for the controller's thread, which may be writing to a slow disk."""
_AFTER_FAULT_S = 0.1
_ASK_AGAIN_S = (1.0, 2.0, 4.0)
"""What to wait before Slurm is asked once more whether a signal warns of the time limit."""
_LOOK_AT_OUTPUT_S = 0.05
"""How often to look for pipes without a reader, once a stop is requested."""


@dataclass(frozen=True)
class StopRequest:
    """The first request to save and leave.

    Attributes:
        signal: ``SIGTERM`` ...; None when the program asked by itself.
        sender_pid: 0 when not known. Slurm's signals come from slurmstepd.
        mono_ns, epoch_ns: when the handler ran, or this rank heard of it.
        of_rank: the rank that was signalled first, where that is another one; ``signal`` is what
            that one got.
    """

    signal: str | None
    sender_pid: int
    mono_ns: int
    epoch_ns: int
    of_rank: int | None = None

    @property
    def message(self) -> str:
        """For a sentence: what came, and where."""
        what = f"{self.signal or 'a request of the program'} received"
        return what if self.of_rank is None else f"{what} by rank {self.of_rank}"


@dataclass(frozen=True)
class _Parking:
    """That all ranks were parked together.

    Attributes:
        name: the same on all ranks.
        closes: how often this rank's gate had been closed by then; -1 before the first time.
        refusal: why the device's memory cannot be moved, empty if it can.
    """

    name: str = ""
    closes: int = -1
    refusal: str = ""


class Controller:
    """Pauses and resumes this process. Made by :func:`hydroslurm.install`; one per process.

    Attributes:
        step: the training step, for the events; set it from the training loop (an attribute write,
            nothing more).
        stop_request: the first request to save and leave, None before; to be read at a safe point.
            Set only if the stops were claimed, or other code handles them.
        had_saver: the stops were claimed at some time since this process started.
        skipped: signals of the plan that were left alone, and why.
        guarding: whether signals that others take are taken back.
        ranks: the other ranks of the job, None for a rank that is alone.
        marks: the NVTX marks of this process.
        journal: what this rank writes down.
        vacating: what moves the device's memory away in a pause, and back.
        watch: looks at a step now and then.
        output: guards stdout and stderr where stops are claimed.
    """

    def __init__(
        self,
        *,
        gate: Gate,
        plan: SignalPlan,
        journal: RankJournal,
        watch: Watch,
        registry_base: Path | None,
        environ: Mapping[str, str],
    ) -> None:
        """
        Args:
            registry_base: where the processes that can be paused announce themselves.
            environ: HYDROSLURM_NVTX, HYDROSLURM_VACATE, HYDROSLURM_LAUNCH_AHEAD_MS; and with which
                Slurm is asked whether a signal warns of the job's time limit.

        Raises:
            UsageError: one of these variables has a bad value.
        """
        self.gate = gate
        self.marks = gate.marks
        self.plan = plan
        self.step: int | None = None
        self.stop_request: StopRequest | None = None
        self.skipped: dict[str, str] = {}
        self.guarding = True
        self.ranks: CoordinatorClient | None = None
        self.journal = journal
        self._next_journal: tuple[RankJournal, threading.Event] | None = None
        self.watch = watch
        self._emit = Emit.from_environ(environ)
        self._recorder = Recorder()
        self._children = Children(registry_base)
        self.vacating = Vacating(
            gate, environ, emit=self.record, on_idle=self._look_again, log=journal.log.path
        )
        self._environ = environ
        self._asking: threading.Thread | None = None
        self._launch_ahead = LaunchAhead(gate, launch_ahead_from(environ))
        self._parking = _Parking()
        self._may_vacate = False
        self._parked = threading.Event()
        self._running = threading.Event()
        self._running.set()
        self._leaving = False
        self._guard = Guard(gate, plan) if isinstance(gate, NativeGate) else None
        self._faults: set[str] = set()
        self._seen: deque[GateEvent] = deque()
        self._stop_lock = threading.Lock()
        self._stop_noted = threading.Event()
        self.output = Output(self._stop_noted.wait, self._record_lost_output)
        self._claimed = self.had_saver = False
        self._on_stop: list[Callable[[StopRequest], None]] = []
        self._owner_pid = os.getpid()
        self._thread = thread(self._loop, name="hydroslurm-controller")

    # --- install and uninstall
    # --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the gate, and the thread that writes down what it sees.

        Raises:
            InstallError: the gate could not be started; nothing is left behind.
        """
        rules = self.plan.rules()
        self.marks.start(self._emit, signals=[rule.signo for rule in rules])
        outcome = self.gate.start(rules)
        self.skipped = {
            signal_name(signo): "it was ignored, or had no handler to help, when we came"
            for signo, result in outcome.items()
            if result is SignalOutcome.LEFT_ALONE
        }
        heard = {s for s, result in outcome.items() if result is SignalOutcome.INSTALLED}
        asked_by = {"pause": self.plan.user_pause, "resume": self.plan.user_resume}
        bound_s = self._launch_ahead.bound_s
        self.record(
            EventKind.INSTALLED,
            {
                "gate": self.gate.name,
                "granularity": self.gate.granularity,
                "boot": boot_id(),
                "signals": [signal_name(signo) for signo in outcome if signo in heard],
                "asked_by": {verb: signo for verb, signo in asked_by.items() if signo in heard},
                **({"launch_ahead_ms": bound_s * 1e3} if bound_s is not None else {}),
                **self.journal.identity.jobstep,
            },
        )
        self._launch_ahead.start()
        self.journal.status.write(self.step, at_once=True)
        self._thread.start()
        self.vacating.get_ready(self.journal.identity.job_id)

    def join(
        self, world: World, *, secret: Callable[[], Secret], warn: Callable[[str], None]
    ) -> None:
        """Pause and stop together with the other ranks from now on; returns at once, for they are
        looked for in the background.

        Args:
            secret: how this rank proves itself to them.
            warn: tells a person that they cannot be reached (any more).
        """
        from hydroslurm.coordination.client import (
            CoordinatorClient,
        )  # a rank that is alone has none

        assert isinstance(self.gate, NativeGate), "hooks hold one rank"
        ranks = CoordinatorClient(
            world,
            self.gate,
            secret=secret,
            emit=self.record,
            on_stop=self._stop_by,
            warn=warn,
        )
        self.ranks = ranks
        ranks.start()

    def part(self) -> None:
        """Pause and stop without the other ranks from now on."""
        ranks, self.ranks = self.ranks, None
        if ranks is not None:
            ranks.leave()

    def write_to(self, journal: RankJournal) -> None:
        """Write events and status there from now on; the journal until now ends as that of a
        process that has left."""
        begun = threading.Event()
        self._next_journal = (journal, begun)
        self.gate.wake()
        begun.wait(_LEAVE_S)

    def stop(
        self,
        *,
        replaced: int | None = None,
        error: BaseException | None = None,
    ) -> int:
        """Resume, restore the handlers and end the thread. Returns how many handlers others had
        replaced.

        Args:
            replaced: how many they were before the caller replaced ours itself; None: as now.
            error: the uncaught error that ends the script.
        """
        if os.getpid() != self._owner_pid:
            raise InstallError(
                "this process was forked from the one that was installed; nothing is installed here"
            )
        self.guarding = False
        self.vacating.end()
        launched = self._launch_ahead.end()
        if self.ranks is not None:
            self.ranks.leave()
        replaced_now = self.gate.stop()
        if replaced is None:
            replaced = replaced_now
        self.marks.stop()
        self._leaving = True
        self.gate.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=_LEAVE_S)
        self._guarded(self._take_events, 0.0)
        self._children.resume()
        data = {"handlers_replaced_by_others": replaced, **launched, **_told_of(error)}
        self.journal.end(data, step=self.step)
        self.output.release()
        return replaced

    # --- what users and engines call
    # -------------------------------------------------------------------------

    @property
    def state(self) -> GateState:
        return self.gate.status().state

    def status(self) -> GateStatus:
        """The gate at this moment."""
        return self.gate.status()

    def pause(self, *, wait_s: float | None = None) -> None:
        """Park the rank at its next operator, with cause ``api``.

        Args:
            wait_s: None returns at once (as the training thread itself must do: it is held at its
                own next operator); a number waits so long until the rank is parked.

        Raises:
            AckTimeout: not parked in time. The pause stays in force.
        """
        self.gate.check_handlers()
        self._parked.clear()
        self._request(Action.PAUSE, self._parked, wait_s, "parked", GateState.PARKED)

    def resume(self, *, wait_s: float | None = None) -> None:
        """Take the cause ``api`` away; the rank runs when no other cause is left.

        Raises:
            AckTimeout: ``wait_s`` was given and the rank is still held; the message names the
                causes that are left.
        """
        self._running.clear()
        self._request(Action.RESUME, self._running, wait_s, "running", GateState.RUNNING)

    def exempt(self) -> AbstractContextManager[None]:
        """Within it the calling thread is never held: for savers, and whatever must go on during a
        pause."""
        return self.gate.exempt()

    def claim_stops(self, on_stop: Callable[[StopRequest], None] | None = None) -> None:
        """Take SIGTERM and the warning signal over: from now on they mean "save and leave" to the
        caller, who reads :attr:`stop_request`; no other handler of theirs is called.

        A stop opens the gate for good: what is parked goes on to its safe point. SIGTERM does not
        end the process any more, so only claim what you answer for. Main thread only with the
        module-hook gate.

        Args:
            on_stop: called once, at the first stop: in a thread of hydroslurm's, or at once if that
                has been. It must not block.

        Raises:
            InstallError: the handlers could not be put in place.
        """
        self._claimed = self.had_saver = True
        self.output.guard()
        with self._stop_lock:
            request = self.stop_request
            if on_stop is not None:
                self._on_stop.append(on_stop)
        if on_stop is not None and request is not None:
            on_stop(request)
        self.gate.claim(Action.STOP)
        if self.stop_request is not None:
            self._call_stop(self.stop_request)

    def release_stops(self) -> None:
        """Take :meth:`claim_stops` back."""
        self._claimed = False
        self.output.release()
        self._on_stop.clear()
        self.gate.unclaim(Action.STOP)

    def request_stop(self) -> None:
        """Ask this process to save and leave, as a signal would."""
        self.gate.request(Action.STOP, Cause(0))

    def _request(
        self,
        action: Action,
        reached: threading.Event,
        wait_s: float | None,
        wanted: str,
        state: GateState,
    ) -> None:
        self.gate.request(action, Cause.API)
        if wait_s is None:
            return
        deadline = time.monotonic() + wait_s
        while not reached.wait(min(0.05, max(0.0, deadline - time.monotonic()))):
            status = self.gate.status()
            if status.state is state:
                return
            if time.monotonic() >= deadline:
                causes = ", ".join(status.causes.names()) or "none"
                raise AckTimeout(
                    f"not {wanted} after {wait_s:g} s: the rank is {status.state.name.lower()}, "
                    f"causes in force: {causes}. "
                    "A thread inside one long operator parks when that operator ends"
                )

    # --- the controller's thread
    # --------------------------------------------------------------------------------

    def _loop(self) -> None:
        with self.gate.exempt():
            while not self._leaving:
                heard, done = self._guarded(self._take_events), self._guarded(self._turn)
                if not heard:
                    self._guarded(self._note_missed_stop)
                if not (heard and done):
                    time.sleep(_AFTER_FAULT_S)

    def _guarded(self, act: Callable[..., object], *arguments: object) -> bool:
        """Nothing ends this thread: without it a pause has no answer, and a stop that was claimed
        from the user's handler would be lost. A fault is reported once."""
        try:
            act(*arguments)
        except BaseException:
            with contextlib.suppress(Exception):  # an error that cannot be printed, no memory
                if (text := traceback.format_exc()) not in self._faults:
                    self._faults.add(text)
                    say(f"a fault of hydroslurm's own, it goes on:\n{text}")
            return False
        return True

    def _turn(self) -> None:
        if self._next_journal is not None:
            self._change_journal(*self._next_journal)
        if self._guard is not None:
            self._guard.check()
        self._children.stop_again()
        if self._may_vacate:
            self._may_vacate = False
            self._vacate()
        self._check_output()
        self.journal.status.write(self.step)

    def _change_journal(self, journal: RankJournal, begun: threading.Event) -> None:
        journal.take_over(self.journal)
        journal.status.write(self.step, at_once=True)
        before, self.journal, self._next_journal = self.journal, journal, None
        before.end({}, step=self.step)
        self.vacating.log = journal.log.path
        begun.set()

    def _check_output(self) -> None:
        if self._claimed and self.stop_request is not None:
            self.output.guard()  # the script may have replaced them
            self.output.check()

    def _take_events(self, wait_s: float | None = None) -> None:
        if wait_s is None:
            due_s = self.journal.status.wait_s()
            wait_s = CHECK_S if self.stop_request is None else _LOOK_AT_OUTPUT_S
            wait_s = wait_s if due_s is None else min(due_s, wait_s)
        self._seen.extend(self.gate.wait_events(wait_s))
        while self._seen:
            seen = self._seen.popleft()
            self._guarded(self._handle, seen)
            if seen.kind is EventKind.STOP_REQUESTED:
                self._guarded(self._note_stop, seen)

    def _note_missed_stop(self) -> None:
        """The event of a stop may be what could not be read."""
        if self.gate.status().state is GateState.STOPPING:
            self._set_stop(StopRequest(None, 0, *clocks()))

    def _record_lost_output(self, stream: str, error: OSError) -> None:
        data = {"stream": stream, "message": str(error)}
        self._guarded(self.record, EventKind.OUTPUT_LOST, data)

    def _handle(self, seen: GateEvent) -> None:
        if seen.kind is EventKind.HANDLER_REPLACED:
            guard = self._guard if self.guarding else None
            if guard and (replaced := guard.see(seen.signo, claimed=self._claimed)):
                self.record(EventKind.HANDLER_REPLACED, vars(replaced))
            return
        if seen.kind is EventKind.GATE_CLOSED:
            self._take_back_handlers()
        data = self._recorder.record(seen)
        ranks = self.ranks
        if seen.kind is EventKind.SIGNAL_RECEIVED:
            self._look_for_warning(seen.signo, seen.sender_pid)
        if seen.kind is EventKind.PARKED:
            if ranks and ranks.have_joined and not ranks.lost:
                data["world_size"] = ranks.world_size
            if stopped := self._children.stop():
                data["children"] = stopped
        self.record(seen.kind, data, mono_ns=seen.mono_ns, epoch_ns=seen.epoch_ns)
        if self.ranks is not None:
            self.ranks.on_gate_event(seen)
        self._follow(seen)

    def _take_back_handlers(self) -> None:
        """What ends the pause must be ours before anybody hears that the rank is parked: CPython's
        handler waits for the main thread, which is held."""
        self.gate.check_handlers()
        for seen in self.gate.wait_events(0.0):
            if seen.kind is EventKind.HANDLER_REPLACED:
                self._guarded(self._handle, seen)
            else:
                self._seen.append(seen)

    def _look_for_warning(self, signo: int, sender_pid: int) -> None:
        """A pause's signal may warn of the time limit. Slurm sends that to all ranks, and the first
        one asks; the pause is in force until the answer is there."""
        job_id, environ, ranks = self.journal.identity.job_id, self._environ, self.ranks
        if job_id is None or (self._asking and self._asking.is_alive()):
            return
        if environ.get(GENERATION_ENV):  # below the agent of an elastic member the agent decides
            return
        is_first = ranks is None or not ranks.have_joined or ranks.lost or ranks.rank == 0
        if not is_first or signo not in (self.plan.user_pause, self.plan.user_resume):
            return

        def ask() -> None:
            from hydroslurm.slurm.stops import why_warned  # every start would pay for it

            name, stop = signal_name(signo), None
            with self.gate.exempt():
                for wait_s in (*_ASK_AGAIN_S, None):
                    try:
                        stop = why_warned(job_id, signo, sender_pid=sender_pid, environ=environ)
                        break
                    except HydroslurmError as error:
                        if wait_s is None:
                            say(f"whether {name} warns of the time limit is not known: {error}")
                        else:
                            time.sleep(wait_s)
                if stop is not None:
                    say(f"{name} is the job's --signal, no pause or resume: {stop.message}")
                    self._stop_by(name)

        self._asking = thread(ask, name="hydroslurm-limit-warning")
        self._asking.start()

    def _note_stop(self, seen: GateEvent) -> None:
        mono_ns = seen.value_ns or seen.mono_ns
        epoch_ns = seen.epoch_ns - (seen.mono_ns - mono_ns)
        name = signal_name(seen.signo) if seen.signo else None
        self._set_stop(StopRequest(name, seen.sender_pid, mono_ns, epoch_ns))

    def _set_stop(self, request: StopRequest) -> None:
        with self._stop_lock:
            if self.stop_request is not None:  # the first one counts
                return
            self.stop_request = request
            listeners = tuple(self._on_stop)
        self._stop_noted.set()
        self._guarded(self._call_stop, request)
        for listener in listeners:
            self._guarded(listener, request)

    def _call_stop(self, request: StopRequest) -> None:
        """Have all ranks stop: one signalled rank is enough. Only if stops are claimed here."""
        if self.ranks is not None and self._claimed and request.of_rank is None:
            self.ranks.call("stop", request.signal or "")

    def _stop_by(self, name: str, of_rank: int | None = None) -> None:
        """Stop by a signal that came to another rank, or that meant something else at first; from
        any thread."""
        self._set_stop(StopRequest(name or None, 0, *clocks(), of_rank))
        with contextlib.suppress(InstallError):  # this rank has just left
            self.gate.request(Action.STOP, Cause(0))  # what is parked goes on to its safe point

    def _follow(self, seen: GateEvent) -> None:
        kind = seen.kind
        if kind is EventKind.PARKED:
            self._running.clear()
            self._parked.set()
            self._drain()
        elif kind is EventKind.LET_THROUGH:  # what it comes to next may wait for them
            self._children.resume()
        elif kind is EventKind.RESUMED:
            self._parked.clear()
            self._running.set()
            self._children.resume()
        if kind in (EventKind.PARKED, EventKind.CAUSES_CHANGED):
            self._vacate()
        if kind in (EventKind.CAUSES_CHANGED, EventKind.RESUMED, EventKind.STOP_REQUESTED):
            self.vacating.on_causes(seen.causes, stops=kind is EventKind.STOP_REQUESTED)

    def _look_again(self) -> None:
        self._may_vacate = True
        self.gate.wake()

    def _vacate(self) -> None:
        """Vacate once no rank moves: one of several waits until all are parked."""
        status = self.gate.status()
        if status.state is not GateState.PARKED or self.stop_request is not None:
            return
        if not status.causes & ~Cause.VACATED:
            return
        ranks, parking = self.ranks, self._parking
        # the gate's own count: this thread may be behind with the event that tells of the closing
        if ranks is None or ranks.lost is not None or not ranks.have_joined:
            self.vacating.begin(
                status.closes, refusal="" if collectives.is_alone() else _OTHERS_UNKNOWN
            )
        elif parking.closes == status.closes:
            self.vacating.begin(status.closes, ranks, parking.name, refusal=parking.refusal)

    def _drain(self) -> None:
        pause = self._recorder.pause
        status = self.gate.status()
        if status.capturing and not status.held:
            # a synchronisation from any thread would break the capture; what it launches runs later
            # anyway
            drain = Drain((), drained=False, took_s=0.0, reason="a CUDA graph is being captured")
            self._record_drain(pause, drain)
        elif device.used_devices():
            thread(self._drain_devices, pause, name="hydroslurm-drain").start()

    def _drain_devices(self, pause: int) -> None:
        """Runs in its own thread: other events must not wait for the devices."""
        draining = self.marks.begin(Range.DRAINING, pause)
        drain = device.drain(exempt=self.gate.exempt)
        self.marks.end(draining)
        if drain is not None and not self._leaving:
            self._record_drain(pause, drain)

    def _record_drain(self, pause: int, drain: Drain) -> None:
        data = {"pause": pause, "devices": list(drain.devices)}
        if drain.drained:
            self.record(EventKind.DRAINED, {**data, "drain_us": drain.took_s * 1e6})
        else:
            more = {"waited_s": drain.took_s, "reason": drain.reason}
            self.record(EventKind.NOT_DRAINED, {**data, **more})

    def record(
        self,
        kind: EventKind,
        data: Mapping[str, object],
        *,
        mono_ns: int | None = None,
        epoch_ns: int | None = None,
    ) -> None:
        """Write an event into this rank's log, of now if not told otherwise; from any thread."""
        self.journal.record(kind, data, step=self.step, mono_ns=mono_ns, epoch_ns=epoch_ns)
        if kind is EventKind.ALL_PARKED:  # in the channel's thread
            self._parking = _Parking(
                name=str(data["parking"]),
                closes=self.gate.status().closes,
                refusal=_why_not_vacated(data.get("in_flight")),
            )
            self._may_vacate = True
        if threading.current_thread() is not self._thread:
            self.gate.wake()


def _why_not_vacated(in_flight: object) -> str:
    """Empty where no collective is in flight."""
    if in_flight is None:
        return (
            "whether collectives are in flight is not known: torch records those of gloo and NCCL, "
            "if TORCH_FR_BUFFER_SIZE (TORCH_NCCL_TRACE_BUFFER_SIZE of an older torch) is not 0"
        )
    return f"{in_flight} collectives are in flight" if in_flight else ""


_OTHERS_UNKNOWN = (
    "this rank is paused alone, and whether other ranks of its process groups have a collective in "
    "flight is not known"
)


def _told_of(error: BaseException | None) -> dict[str, object]:
    """An error as the last event has it: its first line, whether the ranks had met, and whether it
    may be no more than the end of another."""
    if error is None:
        return {}
    first = traceback.format_exception_only(error)[-1].strip().partition("\n")[0]
    return {
        "error": first[:MOST_ERROR],
        "met": not collectives.is_of_meeting(error),
        "lost_peer": collectives.is_of_lost_peer(error),
    }

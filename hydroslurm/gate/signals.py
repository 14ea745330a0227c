"""The meaning of each signal.

The table is data, and a gate installs it. The native gate's handlers run at once, even while the
main thread is inside a long C++ ``backward()``.

How each kind of process is covered:

- **the rank before and after**: :func:`hydroslurm.runtime.autoload.hold` and ``keep_alive``.
- **the rank**: our handlers are installed last, call the handlers they replaced, and are removed
  only where they are still installed. Python sees handlers that lead to ours,
  and later ones are replaced again (:mod:`hydroslurm.gate.handlers`).
- **a forked child** (DataLoader workers by default): inherits the handlers, which do nothing in a
  child. So it neither pauses nor dies at a pause signal; nor, once stops are claimed, at a SIGTERM
  that its parent or the rank did not send.
- **a program started with exec**: has default dispositions, of which USR1 and USR2 kill and TSTP
  stops, so these are blocked (:mod:`hydroslurm.runtime.children`). SIGTERM acts on it as it
  would without us.
- **a child of multiprocessing** stops with its rank (:mod:`hydroslurm.runtime.children`).
- **a process started with a signal ignored** (nohup, some batch wrappers): still ignores it, unless
  ``even_if_ignored``.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import get_type_hints

from hydroslurm.core.rundir import ELASTIC_ENV, GENERATION_ENV
from hydroslurm.core.signals import signal_name, signal_number
from hydroslurm.core.submitit_job import executor_of
from hydroslurm.errors import UsageError
from hydroslurm.gate.protocol import Action, Cause, SignalRule

SIGNALS_ENV = "HYDROSLURM_SIGNALS"
"""Environment variable that changes the plan: ``user_pause=RTMIN+1,user_resume=none``."""
_SUBMITIT_SIGNAL_ENV = "SUBMITIT_PREEMPT_SIGNAL"

_CANNOT_BE_CAUGHT = frozenset({int(signal.SIGKILL), int(signal.SIGSTOP)})


@dataclass(frozen=True)
class SignalPlan:
    """The signals that hydroslurm handles. None: this one is not handled.

    Attributes:
        slurm_pause: what ``scontrol suspend`` and gang scheduling send first; also Ctrl-Z.
        slurm_resume: what they send last. It also precedes every SIGTERM, so it ends only pauses
            by Slurm and the terminal, never one that a person requested.
        user_pause: ``scancel --signal=USR1``, ``hydroslurm pause --pid``.
        user_resume: ends ``user_pause``.
        stop: save and leave. Handled only if the process already has a handler, as the default
            action needs no help from us. A ``Run`` takes it over in any case.
        warning: the same, sent before a time limit (``sbatch --signal=URG@120``). SIGURG, since
            USR1 and USR2 are taken, and a process without a handler ignores it.
        interrupt: Ctrl-C. Ends every pause, so that Python can run its own handler.
        even_if_ignored: also handle signals that were ignored when the process started.
        suspend_stops: ``slurm_pause`` means "save and leave", as ``stop`` does: for a rank whose
            job goes on without it.
    """

    slurm_pause: int | None = int(signal.SIGTSTP)
    slurm_resume: int | None = int(signal.SIGCONT)
    user_pause: int | None = int(signal.SIGUSR1)
    user_resume: int | None = int(signal.SIGUSR2)
    stop: int | None = int(signal.SIGTERM)
    warning: int | None = int(signal.SIGURG)
    interrupt: int | None = int(signal.SIGINT)
    even_if_ignored: bool = False
    suspend_stops: bool = False

    def __post_init__(self) -> None:
        seen: dict[int, str] = {}
        for name, signo in self._numbers().items():
            if signo in _CANNOT_BE_CAUGHT or signo not in signal.valid_signals():
                raise UsageError(
                    f"{name}={signo} is not a signal that a process can catch; choose another"
                )
            if signo in seen:
                raise UsageError(
                    f"{signal_name(signo)} is used for both {seen[signo]} and {name}; each needs "
                    "its own signal"
                )
            seen[signo] = name

    def rules(self) -> tuple[SignalRule, ...]:
        """Return the plan as a gate's signal table."""
        everything = Cause.SLURM | Cause.USER | Cause.API | Cause.TERMINAL | Cause.PEERS
        suspend = (Action.PAUSE, Cause.SLURM, False)
        if self.suspend_stops:
            suspend = (Action.STOP, Cause(0), True)
        table = (
            (self.slurm_pause, *suspend),
            (self.slurm_resume, Action.RESUME, Cause.SLURM | Cause.TERMINAL, False),
            (self.user_pause, Action.PAUSE, Cause.USER, False),
            (self.user_resume, Action.RESUME, Cause.USER, False),
            (self.stop, Action.STOP, Cause(0), True),
            (self.warning, Action.STOP, Cause(0), True),
            (self.interrupt, Action.RESUME, everything, True),
        )
        return tuple(
            SignalRule(
                signo=signo,
                action=action,
                causes=causes,
                even_if_ignored=self.even_if_ignored,
                only_if_handled=only_if_handled,
            )
            for signo, action, causes, only_if_handled in table
            if signo is not None
        )

    def stopping(self) -> frozenset[int]:
        """Return the signals that ask a rank to save and leave."""
        suspend = self.slurm_pause if self.suspend_stops else None
        chosen = (self.stop, self.warning, suspend)
        return frozenset(signo for signo in chosen if signo is not None)

    def pausing(self) -> frozenset[int]:
        """Return the signals of pauses; their default action would stop or kill a child."""
        chosen = (self.slurm_pause, self.slurm_resume, self.user_pause, self.user_resume)
        return frozenset(signo for signo in chosen if signo is not None)

    def killing(self) -> frozenset[int]:
        """Return the pause signals whose default action kills."""
        return self.pausing() - {signal.SIGTSTP, signal.SIGCONT}

    def with_environment(self, environ: Mapping[str, str]) -> SignalPlan:
        """Return the plan with changes from ``HYDROSLURM_SIGNALS``; with ``suspend_stops`` in
        an elastic run; with submitit's signal in its jobs.

        Raises:
            UsageError: an unknown name or signal; the message lists the valid ones.
        """
        if environ.get(GENERATION_ENV) or environ.get(ELASTIC_ENV):
            self = replace(self, suspend_stops=True)
        if executor_of(environ):
            self = self._with_signal_of_submitit(environ.get(_SUBMITIT_SIGNAL_ENV) or "USR2")
        text = environ.get(SIGNALS_ENV, "").strip()
        if not text:
            return self
        valid = {name for name, kind in get_type_hints(SignalPlan).items() if kind is not bool}
        changes: dict[str, int | None] = {}
        for part in text.split(","):
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals or name not in valid:
                raise UsageError(
                    f"{SIGNALS_ENV}: cannot read {part.strip()!r}; write NAME=SIGNAL with NAME one "
                    "of "
                    f"{', '.join(sorted(valid))} and SIGNAL such as USR1, RTMIN+2 or none"
                )
            changes[name] = None if value.lower() == "none" else signal_number(value)
        return replace(self, **changes)  # type: ignore[arg-type]

    def _with_signal_of_submitit(self, name: str) -> SignalPlan:
        """Use submitit's signal, which Slurm sends before the time limit, as the warning. If it is
        one of a pause's two signals (USR2 by default), drop the other one, too."""
        signo = signal_number(name)
        if signo in self.stopping():
            return self
        if signo in (self.user_pause, self.user_resume):
            self = replace(self, user_pause=None, user_resume=None)
        return replace(self, warning=signo)

    def _numbers(self) -> dict[str, int]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value
            for name, value in values.items()
            if value is not None and not isinstance(value, bool)
        }


def is_ours_alone(replaced: Mapping[str, object]) -> bool:
    """Whether the signal of a ``handler_replaced`` event still does only what hydroslurm says.
    ``replaced``: the event's data; see :class:`hydroslurm.gate.handlers.Replaced`."""
    return replaced.get("still_called") is False

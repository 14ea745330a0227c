"""Progress probe of a rank: how soon a step reaches its first collective, and, in a restarted
generation, whether the rank moves and where its main thread is.

The first reveals a slow rank, for which all others wait in that collective. One step per heartbeat
is watched by the native gate's trace, a callback at each operator. At all other safe points the
probe costs one read of a flag.

The agent compares the second over its ranks to find the one that the others wait for; see
:mod:`hydroslurm.jobs.agent.progress`. It costs the training nothing: at each heartbeat the
controller's thread reads one counter of torch's, and the stack of the main thread only if that has
not changed.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hydroslurm.coordination import collectives
from hydroslurm.core.rundir import GENERATION_ENV
from hydroslurm.errors import GateError
from hydroslurm.gate.native_gate import NativeGate

if TYPE_CHECKING:
    from hydroslurm.gate import Gate
    from hydroslurm.gate.protocol import Trace

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
KEPT, LEAST = 7, 3
"""Samples of which the median is reported, and how many it takes: steps that waited for data or
saved are outliers."""
_OF_ONE_RANK = ("c10d::broadcast_", "c10d::send", "c10d::recv_", "c10d::recv_any_source_")
"""Operators that wait for one other rank only; DDP begins each forward with a broadcast of its
buffers."""


class Watch:
    """Looks at this process: :meth:`look` from one thread, :meth:`at_safe_point` from the main one.

    Attributes:
        is_due: the next safe point is to call :meth:`at_safe_point`.
    """

    def __init__(
        self, environ: Mapping[str, str], *, gate: Gate | None = None, ranks: int = 1
    ) -> None:
        """Where the main thread is matters only below an agent that restarts its ranks.

        Args:
            gate: with which steps are watched, where it is native.
            ranks: of the job; nothing waits for a single one.
        """
        self.is_due = False
        self._gate = gate if isinstance(gate, NativeGate) and ranks > 1 else None
        self._samples_s: deque[float] = deque(maxlen=KEPT)
        self._watched: list[tuple[contextlib.ExitStack, Trace, int, int]] = []
        self._step: int | None = None
        self._is_wanted = bool(environ.get(GENERATION_ENV))
        self._before: tuple[int | None, int | None, float | None] | None = None

    def look(self, step: int | None) -> Mapping[str, Any]:
        """At a heartbeat: fields of a :class:`~hydroslurm.core.status.RankStatus`; none where
        nobody is interested. Has the next step watched if steps are made."""
        if self._gate is not None and step not in (None, self._step):
            self._step, self.is_due = step, True
        known = len(self._samples_s) >= LEAST
        first = {"first_collective_s": statistics.median([*self._samples_s])} if known else {}
        return {**first, **self._where(step)} if self._is_wanted else first

    def at_safe_point(self) -> None:
        """Begin to watch a step, or end it."""
        if self._watched:
            self._end_step()
            return
        assert self._gate is not None
        try:
            with contextlib.ExitStack() as stack:
                trace = stack.enter_context(self._gate.trace(64, collectives=True))
                closes = self._gate.status().closes
                self._watched.append((stack.pop_all(), trace, closes, time.monotonic_ns()))
        except GateError:  # somebody else's trace is on
            self.is_due = False

    def _end_step(self) -> None:
        """Take the sample, unless the step had no collective, or a pause."""
        self.is_due = False
        with contextlib.suppress(IndexError):  # the other thread was first
            stack, trace, closes, began_ns = self._watched.pop()
            stack.close()
            stamps_ns = [one.mono_ns for one in trace.operators if one.name not in _OF_ONE_RANK]
            if stamps_ns and self._gate and self._gate.status().closes == closes:
                self._samples_s.append((min(stamps_ns) - began_ns) / 1e9)

    def _where(self, step: int | None) -> dict[str, Any]:
        found = collectives.progress()
        # not in a group yet, or any more: no rank waits for it in a collective
        issued, timeout_s = (None, None) if found is None else (found.issued, found.timeout_s)
        meeting_timeout_s = collectives.meeting_timeout_s() if found is None else None
        now = (step, issued, meeting_timeout_s)
        stands = now == self._before
        self._before = now
        if found is not None and stands:
            # gloo counts sends and receives, which need not be as many on all ranks: then the
            # numbers cannot be compared. To find out takes 20 ms, and is done only where nothing
            # moves
            exact = (collectives.issued_exact() or {}).get(found.key, found.issued)
            issued = found.issued if exact == found.issued else None
        return {
            "collectives": issued,
            "collective_timeout_s": timeout_s,
            "meeting_timeout_s": meeting_timeout_s,
            "stands_at": place_of_main_thread() if stands else "",
        }


def place_of_main_thread() -> str:
    """``train.py:41 in evaluate``: the innermost frame outside of libraries, since that is the
    reader's own code; the innermost frame where there is no other."""
    main = threading.main_thread().ident
    innermost = frame = sys._current_frames().get(main) if main is not None else None
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ""
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"[:1000]

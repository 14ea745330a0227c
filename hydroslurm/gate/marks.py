"""NVTX marks and ranges of this process, in the domain ``hydroslurm``; ``gate/native/marks.h``
explains each. The native gate's library emits them; without it the package ``nvtx`` marks steps,
saves and restores.

That package also gives a script its own ranges in the same domain, beside those of pauses:

    with nvtx.annotate("load batch", domain="hydroslurm"):
        ...

By default pauses, stops and saves are emitted. ``HYDROSLURM_NVTX`` changes that: ``steps`` and
``operators`` add a range per training step and per operator (``steps,operators``); ``off`` emits
nothing. Without a profiler a call ends at one comparison.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum, IntFlag
from typing import Any, TypeVar

from hydroslurm.core.signals import signal_name
from hydroslurm.errors import UsageError

_Key = TypeVar("_Key")

NVTX_ENV = "HYDROSLURM_NVTX"
DOMAIN = "hydroslurm"
NO_RANGE = (1 << 64) - 1


class Emit(IntFlag):
    """What is emitted: bits of ``native/marks.h``."""

    NOTHING = 0
    EVENTS = 1
    STEPS = 2
    OPERATORS = 4

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Emit:
        """Parse ``HYDROSLURM_NVTX``.

        Raises:
            UsageError: an unknown word.
        """
        words = environ.get(NVTX_ENV, "").lower().replace(",", " ").split()
        known = {"on": cls.EVENTS, "steps": cls.STEPS, "operators": cls.OPERATORS}
        if words == ["off"]:
            return cls.NOTHING
        wrong = [word for word in words if word not in known]
        if wrong:
            raise UsageError(
                f"{NVTX_ENV}={environ[NVTX_ENV]!r}: {wrong[0]!r} means nothing here; wanted "
                "`off`, or any of `steps` and `operators`, separated by commas"
            )
        return cls.EVENTS | cls(sum({known[word] for word in words} - {cls.EVENTS}))


class Range(IntEnum):
    """The ranges that Python begins; ``enum hs_range``."""

    PAUSING = 0
    RESUMING = 2
    DRAINING = 3
    SAVING = 4
    COMMITTING = 5
    REQUEUEING = 6
    STEP = 7
    VACATING = 8
    RESTORING = 9


class Marks:
    """The marks of one process, through the native gate's library. Any thread may call the
    methods."""

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        """``library``: a gate's; without one nothing is emitted."""
        self._library = library
        self.emitting = Emit.NOTHING

    def start(self, wanted: Emit, *, signals: Iterable[int]) -> None:
        """Look for a profiler; if there is one, emit from now on.

        Args:
            signals: those whose names the profiler shows.
        """
        if self._library is None:
            return
        result = int(self._library.hs_marks_use(wanted))
        if result < 0:
            warnings.warn(
                f"hydroslurm: operators get no NVTX ranges: {os.strerror(-result)}",
                RuntimeWarning,
                stacklevel=2,
            )
            result = int(self._library.hs_marks_use(wanted & ~Emit.OPERATORS))
        self.emitting = Emit(result)
        for signo in signals if self.emitting else ():
            self._library.hs_marks_name_signal(signo, signal_name(signo).encode())

    def stop(self) -> None:
        """Stop emitting."""
        if self.emitting and self._library is not None:
            self._library.hs_marks_use(0)
        self.emitting = Emit.NOTHING

    def begin(self, name: Range, payload: int) -> int:
        """Begin a range that any thread may end; return the argument of :meth:`end`."""
        if not self.emitting or self._library is None:
            return NO_RANGE
        return int(self._library.hs_marks_begin(name, payload))

    def end(self, range_id: int) -> None:
        """End a range; do nothing for one that was not emitted."""
        if range_id != NO_RANGE and self._library is not None:
            self._library.hs_marks_end(range_id)

    def message(self, text: str) -> None:
        """Emit a mark of the script."""
        if self.emitting and self._library is not None:
            self._library.hs_marks_message(text.encode())

    def end_once(self, ranges: dict[_Key, int], key: _Key) -> None:
        """End the range stored under a key, if any."""
        self.end(ranges.pop(key, NO_RANGE))

    @contextlib.contextmanager
    def range(self, name: Range, payload: int) -> Iterator[None]:
        """Wrap a block in :meth:`begin` and :meth:`end`."""
        opened = self.begin(name, payload)
        try:
            yield
        finally:
            self.end(opened)


class NvtxMarks(Marks):
    """Ranges that Python begins (steps, saves, ...), through the package ``nvtx``: for a rank
    without the native gate, which marks the pauses. Operators get no ranges."""

    def __init__(self) -> None:
        super().__init__()
        self._domain: Any = None

    def start(self, wanted: Emit, *, signals: Iterable[int]) -> None:  # noqa: ARG002
        if not wanted:
            return
        import nvtx  # only if marks are wanted: the import is slow

        # without a profiler in the process the package returns a domain that does nothing
        domain = nvtx.get_domain(DOMAIN)
        if not isinstance(domain, nvtx.nvtx.DummyDomain):
            self._domain, self.emitting = domain, wanted & ~Emit.OPERATORS

    def stop(self) -> None:
        self.emitting = Emit.NOTHING

    def begin(self, name: Range, payload: int) -> int:
        if not self.emitting:
            return NO_RANGE
        self._domain.mark(message="clock", payload=time.monotonic_ns())  # see native/marks.h
        return int(self._domain.start_range(message=name.name.lower(), payload=payload))

    def message(self, text: str) -> None:
        if self.emitting:
            self._domain.mark(message=text)

    def end(self, range_id: int) -> None:
        if range_id != NO_RANGE and self.emitting:
            self._domain.end_range(range_id)

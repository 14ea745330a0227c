"""Keep the rank's pause signals away from the Python processes that it spawns.

A forked child is safe already: it inherits our handlers, which do nothing in it. A *spawned* one
(DataLoader workers with the spawn or forkserver method, the forkserver, the resource tracker)
begins with exec, which resets handlers to the default: one ``scancel --signal=USR1`` to all
processes of the job step would kill it.

What was weighed:

- handlers in the child come too late: it takes a while from exec to the first line of ours, and
  nothing of ours needs run there;
- ignoring the signals in the parent during the spawn would lose a pause that comes just then;
- **blocking** them in the spawning thread only: a blocked mask is inherited through exec, there is
  no gap, and the signal reaches another thread of the parent or waits for the few milliseconds of
  the spawn. The child keeps them blocked for life.

All of multiprocessing's ways to spawn go through ``multiprocessing.util.spawnv_passfds``, so that
is the one place to wrap. A spawned child that is itself a rank (``torch.multiprocessing.spawn``)
calls ``install()``, which unblocks them again.
"""

from __future__ import annotations

import multiprocessing.util
import signal
from collections.abc import Callable, Iterable
from typing import Any


class SpawnShield:
    """Makes multiprocessing spawn its children with some signals blocked. One at a time per
    process."""

    def __init__(self, signals: Iterable[int]) -> None:
        self._signals = frozenset(signals)
        self._original: Callable[..., Any] | None = None
        self._wrapper: Callable[..., Any] | None = None

    def install(self) -> None:
        original = multiprocessing.util.spawnv_passfds
        signals = self._signals

        def spawnv_passfds(*args: Any, **kwargs: Any) -> Any:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
            try:
                return original(*args, **kwargs)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

        self._original, self._wrapper = original, spawnv_passfds
        multiprocessing.util.spawnv_passfds = spawnv_passfds

    def uninstall(self) -> None:
        """Put the original back, unless somebody has wrapped it again since."""
        if multiprocessing.util.spawnv_passfds is self._wrapper and self._original:
            multiprocessing.util.spawnv_passfds = self._original
        self._original = self._wrapper = None

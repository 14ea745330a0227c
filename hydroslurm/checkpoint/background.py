"""One save in a thread of its own, beside the training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from hydroslurm.checkpoint.deadline import InFlight, remaining_s
from hydroslurm.checkpoint.save import SaveRequest
from hydroslurm.core.threads import thread


@dataclass(eq=False)
class BackgroundSave:
    """Runs one save beside the training, and keeps how it ended.

    An interpreter that shuts down waits for its thread, so that a process which simply ends has its
    last save committed. A save needs no executor, all of which are closed by then. The thread lives
    as long as the save: none is left idle in a process that forks.

    Attributes:
        work: does the save; is given the event that asks it to end early.
        expected_s: how long it should take.
        writes: False if this rank only tells the others that it cannot take part.
        exempt: makes the context in which no pause holds the thread.
        after: tidies up once the save has succeeded. Nobody waits for it but :meth:`join` and the
            shutdown of Python: removing an old checkpoint of some GB takes longer than a stop may
            have.
    """

    work: Callable[[threading.Event], None]
    request: SaveRequest
    expected_s: float
    writes: bool
    exempt: Callable[[], AbstractContextManager[None]]
    after: Callable[[], None]
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        """Begin at once."""
        self._ended = threading.Event()
        self._given_up = threading.Event()
        self._begin_s = time.monotonic()
        self._thread = thread(self._run, name=f"hydroslurm-save-{self.request.step}", daemon=False)
        self._thread.start()

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it has ended, after waiting so long at the most."""
        return self._ended.wait(_bounded(timeout_s))

    def join(self, timeout_s: float | None = None) -> bool:
        """Whether it has ended and tidied up, after waiting so long at the most."""
        self._thread.join(_bounded(timeout_s))
        return not self._thread.is_alive()

    def see_through(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, and without a timeout until it has tidied up. If a signal
        handler raises meanwhile, it is given up and waited for: before that the state that it
        writes is not the caller's own."""
        try:
            if timeout_s is None:
                self.join()
            else:
                self.wait(timeout_s)
        except BaseException:
            self.give_up()
            self.join()
            raise

    @property
    def given_up(self) -> bool:
        return self._given_up.is_set()

    def give_up(self) -> None:
        """Ask it to end early; a write or fsync that the kernel is busy with is not interrupted."""
        self._given_up.set()

    def status(self, state: int) -> InFlight:
        """Its step, what it still needs, and whether it writes the state of this number."""
        elapsed_s = time.monotonic() - self._begin_s
        rest_s = remaining_s(expected_s=self.expected_s, elapsed_s=elapsed_s)
        return InFlight(self.request.step, rest_s, is_this=self.request.state == state)

    def _run(self) -> None:
        try:
            with self.exempt():
                self.work(self._given_up)
                self._ended.set()
                if self.writes:
                    self.after()
        except BaseException as error:  # kept for the training thread, which reports it
            self.failure = error
        finally:
            self._ended.set()


def _bounded(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else min(max(0.0, timeout_s), threading.TIMEOUT_MAX)

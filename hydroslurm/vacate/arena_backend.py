"""The backend whose memory is the arena's: opted into with ``HYDROSLURM_VACATE_BY=arena``, because
torch's allocations have to be ours from the start.

Calls that hang are left behind in a thread of their own. A copy that hangs is given up: nothing has
changed by then. A driver that hangs later, with memory away, cannot be undone by anybody in this
process, and the state is UNKNOWN.
"""

from __future__ import annotations

import queue
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from hydroslurm.errors import GateError, VacateError
from hydroslurm.vacate.arena import Arena, Library, load
from hydroslurm.vacate.backend import DeviceState
from hydroslurm.vacate.policy import VACATE_BY_ENV, VACATE_DIR_ENV, VacateBy

USUAL_BYTES_PER_S = {"device": 10e9, "host": 1e9, "file": 0.5e9}
"""Until it was measured in this process: careful figures."""
_SLICE_S = 0.25
_POLL_S = 0.02
_ORDER = (DeviceState.CHECKPOINTED, DeviceState.LOCKED, DeviceState.RUNNING)


class ArenaBackend:
    """The arenas of this process as a backend.

    Args:
        arenas: those that there are: one per device in use, or one of the host's memory.
        usual_bytes_per_s: until it has been measured.
        folder: where to spill the copy to; empty: it stays in memory.
    """

    name = "arena"

    def __init__(
        self, arenas: Callable[[], Sequence[Arena]], *, usual_bytes_per_s: float, folder: str = ""
    ) -> None:
        self._arenas = arenas
        self._folder = folder
        self._files: list[IO[bytes]] = []
        self.bytes_per_s = USUAL_BYTES_PER_S["file"] if folder else usual_bytes_per_s

    def device_bytes(self) -> int:
        return sum(int(one.numbers.mapped_bytes) for one in self._arenas())

    def host_bytes(self) -> int:
        if self._folder:
            return 0
        numbers = [one.numbers for one in self._arenas()]
        return sum(max(0, one.live_bytes - one.staging_bytes) for one in numbers)

    def refusal(self) -> str:
        if self.device_bytes() == 0:
            return "the arena holds no memory: the training has allocated none since the start"
        try:
            self._spill()
        except (OSError, VacateError) as error:
            return f"the copy cannot be written to {self._folder} ({VACATE_DIR_ENV}): {error}"
        return ""

    def lock(self, timeout_s: float) -> None:
        for one in self._in(DeviceState.RUNNING):
            _call("lock", one.lock, timeout_s, give_up=one.abandon)

    def checkpoint(self, timeout_s: float) -> int:
        began_s, until_s = time.monotonic(), time.monotonic() + timeout_s
        freed_bytes = 0
        for one in self._in(DeviceState.LOCKED):
            left_s = max(0.0, until_s - time.monotonic())
            freed_bytes += _call("checkpoint", one.checkpoint, left_s, give_up=one.abandon)
        self.bytes_per_s = max(freed_bytes, 1) / max(time.monotonic() - began_s, 1e-3)
        return freed_bytes

    def restore(self, timeout_s: float) -> None:
        for one in self._in(DeviceState.CHECKPOINTED):
            _call("restore", one.restore, timeout_s)

    def unlock(self, timeout_s: float) -> None:
        for one in self._in(DeviceState.LOCKED):
            _call("unlock", one.unlock, timeout_s)
        self._drop_files()

    def state(self, timeout_s: float) -> DeviceState:
        """That of the arena which is furthest away."""
        until_s = time.monotonic() + timeout_s
        while True:
            found = [one.state for one in self._arenas()]
            if None not in found:
                return next((one for one in _ORDER if one in found), DeviceState.RUNNING)
            if time.monotonic() >= until_s:
                return DeviceState.UNKNOWN
            time.sleep(_POLL_S)

    def close(self) -> None:
        if self.state(0.0) is not DeviceState.RUNNING:
            return  # the files hold what is away
        self._drop_files()

    def _in(self, state: DeviceState) -> list[Arena]:
        """Those that a call is still for: one of several may have failed before."""
        return [one for one in self._arenas() if one.state in (state, None)]

    def _drop_files(self) -> None:
        """The next vacate has others: a child that was forked meanwhile reads these."""
        try:
            for one in self._arenas() if self._files else ():
                one.spill_to(-1)
        except VacateError:  # a copy that was given up hangs in one still
            return
        while self._files:
            self._files.pop().close()

    def _spill(self) -> None:
        """A file for each arena. Without a name, so that nobody else can change it, and it is gone
        with this process."""
        if not self._folder:
            return
        for number, one in enumerate(self._arenas()):
            if number == len(self._files):
                self._files.append(tempfile.TemporaryFile(dir=self._folder))  # noqa: SIM115
            one.spill_to(self._files[number].fileno())


def _call(
    verb: str,
    function: Callable[[], Any],
    timeout_s: float,
    *,
    give_up: Callable[[], bool] = lambda: False,
) -> Any:
    """Call it in a thread. Time in which this process was itself stopped does not count.

    Raises:
        VacateError: it has, or it has not answered.
    """
    answers: queue.SimpleQueue[tuple[Any, VacateError | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((function(), None))
        except VacateError as error:
            answers.put((None, error))

    threading.Thread(target=run, name=f"hydroslurm-arena-{verb}", daemon=True).start()
    waited_s = 0.0
    while True:
        began_s = time.monotonic()
        slice_s = max(0.0, min(_SLICE_S, timeout_s - waited_s))
        try:
            result, mistake = answers.get(timeout=slice_s)
            break
        except queue.Empty:
            waited_s += min(time.monotonic() - began_s, 2 * _SLICE_S)
            if waited_s < timeout_s:
                continue
        undone = "; it was given up, and nothing has changed" if give_up() else ""
        raise VacateError(f"the arena's {verb} did not answer within {timeout_s:g} s{undone}")
    if mistake is not None:
        raise mistake
    return result


class _Opened:
    """What this process has asked for, and got: torch's allocator is changed once, for good."""

    by = VacateBy.CUDA_CHECKPOINT
    why_not = ""
    folder = ""
    library: Library | None = None
    of_host: Arena | None = None


def open_arena(environ: Mapping[str, str]) -> None:
    """Have torch allocate from an arena, where ``HYDROSLURM_VACATE_BY`` asks for that. Where it
    cannot be done, the training goes on without, and a warning says so.

    Raises:
        UsageError: another word in the variable.
    """
    _Opened.by = VacateBy.from_environ(environ)
    _Opened.folder = environ.get(VACATE_DIR_ENV, "").strip()
    if _Opened.by is not VacateBy.ARENA:
        if _Opened.folder:
            warnings.warn(
                f"hydroslurm: {VACATE_DIR_ENV}={_Opened.folder!r} has no effect without "
                f"{VACATE_BY_ENV}=arena",
                RuntimeWarning,
                stacklevel=2,
            )
        return
    if _Opened.library is not None:
        return
    try:
        _Opened.library = _take_over(load())
        _Opened.why_not = ""
    except (GateError, VacateError, RuntimeError) as error:
        _Opened.why_not = f"{VACATE_BY_ENV}=arena was not possible: {error}"
        warnings.warn(
            f"hydroslurm: {_Opened.why_not}. Pauses do not vacate. Where the script uses the "
            "device before hydroslurm.install(), start it with --preempt",
            RuntimeWarning,
            stacklevel=2,
        )


def _take_over(library: Library) -> Library:
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        _Opened.of_host = library.serve_cpu()
    elif why := library.why_no_cuda():
        raise VacateError(why)
    else:
        library.use_for_cuda()
    return library


def is_asked_for() -> bool:
    """Whether this process is to vacate by its arena, and not otherwise."""
    return _Opened.by is VacateBy.ARENA


def why_no_arena() -> str:
    """Why there is none though it is asked for; empty if there is one, or it is not."""
    return _Opened.why_not


def backend_of(devices: Sequence[int]) -> ArenaBackend | None:
    """That of this process; None where nothing of it is in an arena.

    Args:
        devices: those of CUDA that it uses.
    """
    library, host = _Opened.library, _Opened.of_host
    if host is not None:
        kept = (host,)
        return ArenaBackend(
            lambda: kept, usual_bytes_per_s=USUAL_BYTES_PER_S["host"], folder=_Opened.folder
        )
    if library is None or not devices:
        return None
    return ArenaBackend(
        lambda: [found for one in devices if (found := library.of_cuda(one)) is not None],
        usual_bytes_per_s=USUAL_BYTES_PER_S["device"],
        folder=_Opened.folder,
    )

"""What Python runs at its start: make an unmodified script preemptible once it imports torch, and
keep the processes below such a rank alive.

The package brings one line for Python's start-up (``hydroslurm_autoload.pth`` in site-packages),
which looks for ``HYDROSLURM_PREEMPT`` in the environment and calls :func:`start` if it is there.
``srun --preempt`` sets it, and so do ``hydroslurm run`` and the person who exports it;
``HYDROSLURM_PREEMPT=off`` is like not setting it. An installed process sets ``HYDROSLURM_BELOW``
for whatever it starts, and the first one, empty, where it is not set. ``python -S`` reads no such
lines; ``-I`` and ``-E`` do. Every Python of the environment compiles the line, in a virtual
environment twice: so it looks for one variable only, and this module imports little.

:func:`start` imports neither torch nor anything else of weight. It waits for the process's own
``import torch``, at whose end pausing is installed: before any operator can have run, and never in
a process that does not use torch. Processes that are not ranks are left alone:

- children of a rank: DataLoader workers, compile workers, helpers written in Python. A forked
  one inherits nothing that waits; one that is started with exec finds in its environment that its
  rank is taken, and ignores the pause signals. Children made by multiprocessing are stopped while
  their rank is parked (:mod:`hydroslurm.runtime.children`). Ranks that a script starts itself
  (``torch.multiprocessing.spawn``) are paused that way too, but never asked to save: for that use
  srun or torchrun, or call ``hydroslurm.install()`` in them;
- launchers, which start ranks: torchrun, ``hydroslurm agent`` ... Their workers have a rank of
  their own, and are installed.

All modes install the same. ``pause`` is all that a script without a ``hydroslurm.Run`` can do.
``vacate`` is the same, and each pause also moves the device's memory to the host
(:mod:`hydroslurm.vacate`). ``requeue`` says that the job may be stopped, and is for scripts with a
``Run``, which takes over SIGTERM when it is made; until then, and in a script without one, SIGTERM
ends the process as it did before, and rank 0 requeues a job that is preempted (:func:`leave`).

From here to the end of the process SIGUSR1 and SIGUSR2 do not kill it, see :func:`keep_alive`.

A failure is one line on stderr, and the script runs as if nothing had been asked for.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # a Python that never comes to torch is to start no later for us
    import importlib.abc
    from importlib.machinery import ModuleSpec
    from types import FrameType, ModuleType

PREEMPT_ENV = "HYDROSLURM_PREEMPT"
"""Environment variable: ``pause``, ``vacate`` or ``requeue`` asks for it; ``off`` and 0 do not."""
TAKEN_ENV = "HYDROSLURM_RANK_TAKEN"
"""Environment variable, set by a process that becomes a rank: ``PID:RANK``, for its children."""
BELOW_ENV = "HYDROSLURM_BELOW"
"""Environment variable, set by an installed process for what it starts: ``PID:STARTED:SIGNALS``;
when it started, in clock ticks, and the numbers of the signals that nothing below it dies of."""
BIND_ENV = "HYDROSLURM_BIND_NUMA"
"""Environment variable: 1 has each rank bound to its NUMA node when it imports torch."""
MODES = ("pause", "vacate", "requeue")
_OFF = frozenset({"", "0", "off", "no", "none", "false"})
_SLURM_TASK = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")
_TORCHRUN_WORKER = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK")
_LAUNCHERS = frozenset({
    "torchrun", "torch.distributed.run", "torch.distributed.launch",
    "accelerate", "accelerate.commands.accelerate_cli", "accelerate.commands.launch",
    "deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch",
    "hydroslurm", "hydroslurm.cli",
})  # fmt: skip
"""Programs that import torch and start ranks, or look at them, without being one."""
_ADAPTED = {"transformers.trainer": "hydroslurm.integrations.transformers"}
"""Modules of frameworks that no entry point leads to, and the adapter that each is given to."""
# of prove.updates and gate.signals, whose import every Python would pay for
_PROVE_ENV = "HYDROSLURM_PROVE"
_SIGNALS_ENV, _SUBMITIT_ENV = "HYDROSLURM_SIGNALS", "SUBMITIT_EXECUTOR"


def start(environ: Mapping[str, str] | None = None) -> None:
    """Wait for torch if this process is to become preemptible. Called by Python's start-up; never
    raises."""
    environ = os.environ if environ is None else environ
    if environ.get(_PROVE_ENV):
        _after("torch", _record)
    mode = environ.get(PREEMPT_ENV, "").strip().lower()
    if mode in _OFF or _is_taken(environ):
        live_below_rank(environ)
        return
    if mode not in MODES:
        say(
            f"{PREEMPT_ENV}={mode[:60]!r} is not known; wanted {', '.join(MODES)} or off. This "
            "process is not preemptible"
        )
        return
    signals = killing(environ)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # they wait for install(), which takes them
    keep_alive(signals)
    if mode == "requeue":
        adapt()
        requeue_when_ended(environ)
    if "torch" in sys.modules:  # only tests start that late
        _install(sys.modules["torch"])
    else:
        _after("torch", _install)


def requeue_when_ended(environ: Mapping[str, str]) -> None:
    """Have rank 0 of a job step requeue its job if a preemption ends it before a ``Run`` can save.
    Main thread only; a handler that is there stays."""
    global _leaves
    step, ranks = environ.get("SLURM_STEP_ID", ""), {"SLURM_PROCID": "", "LOCAL_RANK": "0"}
    is_task = step.isdecimal() and int(step) < _NO_STEP
    is_first = is_task and all(environ.get(name, none) == "0" for name, none in ranks.items())
    in_main = threading.current_thread() is threading.main_thread()
    if is_first and in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _leaves = os.getpid()
        signal.signal(signal.SIGTERM, leave)


def leave(signo: int, _: FrameType | None) -> None:
    """Have ``hydroslurm batch --ended`` requeue the job if it is preempted, then die of the signal.
    A forked child only dies.

    In another process: the script may be in the middle of any import, so no module can be imported
    here. C code without an end keeps the handler from running; Slurm then kills the process after
    the grace, and requeues the job itself.
    """
    if os.getpid() == _leaves:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signo})  # Slurm sends it again within 20 ms
        words = [sys.executable, "-m", "hydroslurm.cli", "batch", "--ended", str(128 + signo)]
        try:
            asks = os.posix_spawn(words[0], words, {**os.environ, PREEMPT_ENV: "off"})
            os.waitpid(asks, 0)
        except OSError as error:
            say(f"the job cannot be requeued: {words[0]}: {error.strerror}")
    signal.signal(signo, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signo})
    os.kill(os.getpid(), signo)


_leaves = 0
"""The process whose SIGTERM calls :func:`leave`."""
_NO_STEP = 0xFFFFFFF0
"""SLURM_MAX_NORMAL_STEP_ID of slurm.h; a batch script has a higher number, or none."""


def adapt() -> None:
    """Give each framework to its adapter: now if it is imported, else at its import."""
    for name in _ADAPTED:
        when_imported(name, _give)


def when_imported(name: str, adapt: Callable[[ModuleType], None]) -> None:
    """Call this with a framework's module: now if it is imported, else at the end of its import. A
    failure is one line on stderr."""
    if name in sys.modules:
        _adapt(sys.modules[name], adapt)
    else:
        _after(name, adapt)


def _after(name: str, call: Callable[[ModuleType], None]) -> None:
    """Have this called at the end of the coming import of a module, after what waits already."""
    waiting = next((one for one in _finders() if one.name == name), None)
    if waiting is None:
        sys.meta_path.insert(0, _Finder(name, call))
    elif call not in waiting.calls:
        waiting.calls.append(call)


def _finders() -> list[_Finder]:
    return [one for one in sys.meta_path if isinstance(one, _Finder)]


class RankAbove(NamedTuple):
    """An installed process that this one was started by, directly or not."""

    pid: int
    started: int
    signals: frozenset[int]

    def as_text(self) -> str:
        return f"{self.pid}:{self.started}:{','.join(map(str, sorted(self.signals)))}"


def rank_above(environ: Mapping[str, str]) -> RankAbove | None:
    """The nearest one, from the environment; None if there is none, or if it is gone: what a rank
    submits takes its environment to other machines."""
    pid, _, rest = environ.get(BELOW_ENV, "").partition(":")
    started, _, signals = rest.partition(":")
    numbers = [pid, started, *filter(None, signals.split(","))]
    if not all(number.isdecimal() for number in numbers) or int(pid) == os.getpid():
        return None
    from hydroslurm.core.registry import start_ticks

    if start_ticks(int(pid)) != int(started):
        return None
    valid = signal.valid_signals()
    return RankAbove(
        int(pid), int(started), frozenset(s for s in map(int, numbers[2:]) if s in valid)
    )


def live_below_rank(environ: Mapping[str, str]) -> None:
    """Ignore the rank's signals that nobody handles yet, and unblock them, so that a handler that
    is installed later gets them. A process made by multiprocessing keeps them blocked, for it may
    become a rank (``hydroslurm.install()``), which takes what has arrived."""
    rank = rank_above(environ)
    if rank is None:
        return
    untouched = {s for s in rank.signals if signal.getsignal(s) is signal.SIG_DFL}
    if any("multiprocessing." in word for word in sys.orig_argv):
        ignore(untouched - signal.sigpending())
        return
    ignore(untouched)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, rank.signals)


def is_asked(environ: Mapping[str, str]) -> bool:
    """Whether a Python with this environment is to become preemptible."""
    return environ.get(PREEMPT_ENV, "").strip().lower() in MODES


def killing(environ: Mapping[str, str]) -> frozenset[int]:
    """The pause signals whose default action would kill."""
    if environ.get(_SIGNALS_ENV) or environ.get(_SUBMITIT_ENV):  # few have one; it is an import
        from hydroslurm.errors import UsageError
        from hydroslurm.gate.signals import SignalPlan

        try:
            return SignalPlan().with_environment(environ).killing()
        except UsageError:  # install() will say it
            pass
    return frozenset({signal.SIGUSR1, signal.SIGUSR2})


def hold(signals: frozenset[int]) -> None:
    """Make these signals wait in the program that this process is about to become, until its
    ``install()`` takes them; nothing that it starts before then dies of one.

    Blocked, because that keeps the request, and ignored as well, for some programs empty their mask
    (dash does when it waits for a command). Both survive exec, and Linux keeps an ignored signal
    that is blocked. Ignoring would discard signals that have arrived already, so those keep their
    action. SIGTERM and the warning are never held: a process that has not begun to train has
    nothing to save and ends at once.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    ignore(signals - signal.sigpending())


def keep_alive(signals: Iterable[int]) -> None:
    """Make sure that these signals never kill this process: a handler that does nothing, below all
    others, and SIG_IGN at the very end. Main thread only; elsewhere it does nothing.

    A handler, because SIG_IGN means "leave it alone" to ``install()``. ``uninstall()`` puts it back
    like any other: there is no gap. SIG_IGN at the end, because CPython restores the default for
    each of its handlers before it clears the modules, whose finalisers may take long. Registered
    first, it is the last that atexit calls.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    nobody = (signal.SIG_DFL, signal.SIG_IGN)
    chosen = [signo for signo in signals if signal.getsignal(signo) in nobody]
    for signo in chosen:
        signal.signal(signo, _go_on)
        signal.siginterrupt(signo, False)
    if chosen:
        atexit.register(ignore, chosen)


def _go_on(_signo: int, _frame: FrameType | None) -> None:
    """Handle a pause signal of a process that cannot be paused now."""


def ignore(signals: Iterable[int]) -> None:
    """SIG_IGN for each of them. Main thread only."""
    for signo in signals:
        signal.signal(signo, signal.SIG_IGN)


def stand_down() -> None:
    """Cancel the installation at torch's import: the script calls ``install()`` itself."""
    for finder in _finders():
        if _install in finder.calls:
            finder.calls.remove(_install)
        if not finder.calls:
            sys.meta_path.remove(finder)


def take_rank() -> None:
    """Tell the children of this process that it is the rank that was asked for. Comes first: what
    is started to build or to test the gate is not a rank."""
    if is_asked(os.environ):
        os.environ[TAKEN_ENV] = f"{os.getpid()}:{which_rank(os.environ)}"


def which_rank(environ: Mapping[str, str]) -> str:
    """One word for the rank that a process with this environment is, or is a child of.

    RANK and LOCAL_RANK count below torchrun only, which sets them for what it starts. A script that
    sets them for itself does so after it was installed, and its children are no other rank.
    """
    below_torchrun = bool(environ.get("TORCHELASTIC_RUN_ID"))
    names = (*_SLURM_TASK, *(_TORCHRUN_WORKER if below_torchrun else ()))
    return "/".join(environ.get(name, "") for name in names)


def is_launcher() -> bool:
    """Whether the program that runs here is known to start ranks instead of being one."""
    return _program().removesuffix(".__main__") in _LAUNCHERS


class _Finder:
    """Lets the other finders find a module, and makes calls after its execution.

    It stays until the module has been executed: programs check whether torch exists
    (``importlib.util.find_spec``) long before they import it, or try to in vain. Then it goes:
    transformers looks for packages that are not there at every step, through all finders.
    """

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self.name, self.calls = name, [call]

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find and find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: importlib.abc.Loader) -> None:
        """Add the calls after ``exec_module`` of this loader, which is this module's alone. Its
        type, source and resources stay what they are."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if self.name == "torch":
                _without_collections(execute, module)
            else:
                execute(module)
            del loader.exec_module
            sys.meta_path[:] = [one for one in sys.meta_path if one is not self]
            # threads that install() starts import torch too. As long as the module counts as being
            # initialised they would wait for this thread, which may wait for them
            assert module.__spec__ is not None
            module.__spec__._initializing = False  # type: ignore[attr-defined]
            for call in self.calls:
                _adapt(module, call)

        try:
            loader.exec_module = exec_module  # type: ignore[method-assign]
        except AttributeError as error:
            say(f"{self.name} was not made preemptible: it has an odd loader ({error})")


def _without_collections(execute: Callable[[ModuleType], object], module: ModuleType) -> None:
    """Keep the garbage collector away from an import that makes a million objects and no garbage.

    It would walk over all of them again and again, then and in every full collection that follows,
    such as those of the first optimizer, which imports ``torch._dynamo``: 0.3 s of CPU before the
    first step, measured with torch 2.13. So it is off during the import, and what is there at the
    end is frozen (``gc.freeze``, which also keeps the pages of forked workers shared). There can be
    no tensor yet: a model that goes is collected as ever. It thaws at the exit: a finaliser of the
    script's that hangs in a cycle with what was frozen would not run otherwise.
    """
    from hydroslurm.core.garbage import without_gc

    was_on = gc.isenabled()
    with without_gc():
        execute(module)
        if was_on:
            gc.freeze()
            atexit.register(gc.unfreeze)


def _adapt(module: ModuleType, call: Callable[[ModuleType], None]) -> None:
    try:
        call(module)
    except Exception as error:
        say(f"{module.__name__} was not made preemptible: {error}")


def _give(module: ModuleType) -> None:
    import importlib

    importlib.import_module(_ADAPTED[module.__name__]).install(module)


def _record(_: ModuleType) -> None:
    """Of ``hydroslurm prove``: this process's optimizer steps are written down."""
    from hydroslurm.prove.recorder import start

    start()


def _install(_: ModuleType) -> None:
    if is_launcher():
        return
    take_rank()
    if os.environ.get(BIND_ENV, "").strip().lower() not in _OFF:
        _bind()
    try:
        from hydroslurm.runtime.install import install_unasked

        install_unasked()
    except Exception as error:
        say(f"this process could not be made preemptible: {error}")


def _bind() -> None:
    """Before the first operator: torch's threads start where this one is."""
    try:
        from hydroslurm.numa import bind

        bind()
    except Exception as error:
        say(f"this process could not be bound to its NUMA node: {error}")


def _is_taken(environ: Mapping[str, str]) -> bool:
    """A process that replaced itself (``exec``) is what it was."""
    pid, _, rank = environ.get(TAKEN_ENV, "").partition(":")
    return bool(pid) and pid != str(os.getpid()) and rank == which_rank(environ)


def _program() -> str:
    """The module that ``python -m`` runs, or the name of the script."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return str(spec.name)
    first = sys.argv[0] if sys.argv else ""
    if first == "-m":  # torch is imported as the parent of the module that is still being found
        return sys.orig_argv[-len(sys.argv)].removeprefix("-m")
    return os.path.basename(first)  # noqa: PTH119 - pathlib is imported for nothing else


@functools.cache  # Python reads the start-up lines of a virtual environment twice
def say(text: str) -> None:
    """One line on stderr."""
    try:
        sys.stderr.write(f"hydroslurm: {text}\n")  # print() would take stdout where it is None
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # stderr closed, or None
        pass

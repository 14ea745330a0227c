"""Make an unmodified script preemptible: install pausing once it has imported torch.

How it gets in: the package brings one line for Python's start-up (``hydroslurm_autoload.pth`` in
site-packages), which looks for ``HYDROSLURM_PREEMPT`` and ``HYDROSLURM_BELOW`` in the environment
and calls :func:`start` where one is there. ``srun --preempt`` sets the first, and so do
``hydroslurm run`` and the person who exports it; ``HYDROSLURM_PREEMPT=off`` is like not setting it.
The second is for what an installed process starts (:mod:`hydroslurm.runtime.below`). ``python -S``
reads no such lines, and ``-I`` and ``-E`` do.

:func:`start` imports neither torch nor anything else of weight. It waits for the process's own
``import torch``, at whose end pausing is installed: before any operator can have run, and never in
a process that does not use torch. Processes that are no ranks are left alone:

- children of one that is: DataLoader workers, compile workers, helpers written in Python. A forked
  one inherits nothing that waits; one that is started anew finds in its environment that its rank
  is taken, and ignores the pause signals. What multiprocessing makes and trains follows its rank
  (:mod:`hydroslurm.runtime.following`). Ranks that a script starts for itself
  (``torch.multiprocessing.spawn``) are paused so, and not stopped: for that use srun or torchrun,
  or call ``hydroslurm.install()`` in them;
- launchers, which start ranks: torchrun, ``hydroslurm agent`` ... Their workers have a rank of
  their own, and are installed.

The two modes install the same. ``pause`` is all that a script without a ``hydroslurm.Run`` can do.
``requeue`` says that the job may be stopped, and is for scripts with a ``Run``, which takes SIGTERM
over when it is made; until then, and in a script without one, SIGTERM does what it did before:
nothing that could not save is kept from ending.

From here to the end of the process SIGUSR1 and SIGUSR2 do not kill it, see :func:`keep_alive`.

A failure is one line on stderr, and the script runs as if nothing had been asked for.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a Python that never comes to torch is to start no later for us
    import importlib.abc
    from importlib.machinery import ModuleSpec
    from types import FrameType, ModuleType

PREEMPT_ENV = "HYDROSLURM_PREEMPT"
"""Environment variable: ``pause`` or ``requeue`` asks for it; ``off`` and 0 do not."""
TAKEN_ENV = "HYDROSLURM_RANK_TAKEN"
"""Environment variable, set by a process that becomes a rank: ``PID:RANK``, for its children."""
MODES = ("pause", "requeue")
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
_SIGNALS_ENV = "HYDROSLURM_SIGNALS"  # of runtime.signals, whose import every Python would pay for


def start(environ: Mapping[str, str] | None = None) -> None:
    """Wait for torch in this process, if it is one that was asked for. Called by Python's start-up;
    never raises."""
    environ = os.environ if environ is None else environ
    mode = environ.get(PREEMPT_ENV, "").strip().lower()
    if mode in _OFF or _is_taken(environ):
        from hydroslurm.runtime.below import live_below

        live_below(environ)
        return
    if mode not in MODES:
        say(
            f"{PREEMPT_ENV}={mode[:60]!r} is not known; wanted {' or '.join(MODES)}, or off. This "
            "process is not preemptible"
        )
        return
    signals = killing(environ)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # they wait for install(), which takes them
    keep_alive(signals)
    if "torch" in sys.modules:  # nobody's start-up is that early but a test's
        _install()
    else:
        after_torch(_install)


def after_torch(call: Callable[[], None]) -> None:
    """Have this called at the end of the ``import torch`` that is to come."""
    if not any(isinstance(finder, _TorchFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchFinder(call))


def is_asked(environ: Mapping[str, str]) -> bool:
    """Whether a Python with this environment is to become preemptible."""
    return environ.get(PREEMPT_ENV, "").strip().lower() in MODES


def killing(environ: Mapping[str, str]) -> frozenset[int]:
    """The pause signals whose default action would kill."""
    if environ.get(_SIGNALS_ENV):  # few have it, and it costs an import
        from hydroslurm.errors import UsageError
        from hydroslurm.gate.signals import SignalPlan

        try:
            return SignalPlan().with_environment(environ).killing()
        except UsageError:  # install() will say it
            pass
    return frozenset({signal.SIGUSR1, signal.SIGUSR2})


def hold(signals: frozenset[int]) -> None:
    """Have these signals wait in the program that this process is about to become, until its
    ``install()`` takes them; nothing that it starts before dies of one.

    Blocked, because that keeps the request, and ignored as well, for there are programs that empty
    their mask (dash does when it waits for a command). Both outlive exec, and Linux keeps an
    ignored signal that is blocked. Ignoring throws away what has come already, so that stays as it
    is. SIGTERM and the warning are never held: what has not begun to train has nothing to save, and
    is to end at once.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    ignore(signals - signal.sigpending())


def keep_alive(signals: Iterable[int]) -> None:
    """Have these signals never kill this process: a handler that does nothing, below all others,
    and SIG_IGN at the very end. Main thread only; elsewhere it does nothing.

    A handler, because SIG_IGN means "leave it alone" to whoever installs. ``uninstall()`` puts it
    back as it does any other: there is no moment in between. SIG_IGN at the end, for CPython puts
    the default back for each of its handlers before it clears the modules, whose finalisers may
    take long. Registered first, it is the last that atexit calls.
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


def _go_on(signo: int, _: FrameType | None) -> None:
    """A pause of a process that cannot be paused now."""
    if came is not None:
        came.append(signo)


came: list[int] | None = None
"""Those pauses, in order, for whoever puts a list here: one installation takes another's place."""


def ignore(signals: Iterable[int]) -> None:
    """SIG_IGN for each of them. Main thread only."""
    for signo in signals:
        signal.signal(signo, signal.SIG_IGN)


def stand_down() -> None:
    """Wait no longer: somebody installs pausing by a call of their own."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _TorchFinder)]


def take_rank() -> None:
    """Tell the children of this process that it is the rank that was asked for. First of all: what
    is started to build or to try the gate is no rank."""
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


class _TorchFinder:
    """Has torch found by the others, and puts our call behind its execution.

    It stays until torch has been executed: programs look whether there is a torch
    (``importlib.util.find_spec``) long before they import it, or try to in vain.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find and find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _follow(spec.loader, self._call)
                return spec
        return None


def _follow(loader: importlib.abc.Loader, call: Callable[[], None]) -> None:
    """Put a call behind ``exec_module`` of this loader, which is torch's alone. The loader stays
    what it is for all who ask for its type, the source, or resources."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        del loader.exec_module
        stand_down()
        # threads that install() starts import torch too. As long as the module counts as being
        # initialised they would wait for this thread, which may wait for them
        assert module.__spec__ is not None
        module.__spec__._initializing = False  # type: ignore[attr-defined]
        call()

    try:
        loader.exec_module = exec_module  # type: ignore[method-assign]
    except AttributeError as error:
        say(f"this process could not be made preemptible: torch has an odd loader ({error})")


def _install() -> None:
    if is_launcher():
        return
    take_rank()
    try:
        from hydroslurm.runtime.install import install_unasked

        install_unasked()
    except Exception as error:
        say(f"this process could not be made preemptible: {error}")


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

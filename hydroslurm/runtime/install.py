"""``install()`` and ``uninstall()``: make this process pausable, and leave it as it was.

One process has one controller. Installing is all or nothing: whatever was set up before a failure
is taken back.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hydroslurm import numa
from hydroslurm.coordination.world import World
from hydroslurm.core import registry, rundir
from hydroslurm.core.events import EventKind, EventLog
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import (
    AlreadyInstalled,
    HydroslurmError,
    NotInstalled,
    TorchMissing,
    UsageError,
)
from hydroslurm.gate import GATE_ENV, GateKind, chosen_kind, open_gate
from hydroslurm.gate.signals import SIGNALS_ENV, SignalPlan
from hydroslurm.runtime import autoload
from hydroslurm.runtime.children import (
    spawns_shielded,
    wandb_shielded,
    workers_shielded,
)
from hydroslurm.runtime.controller import Controller
from hydroslurm.runtime.journal import Identity, RankJournal, StatusWriter, interval_s
from hydroslurm.runtime.standing import Watch
from hydroslurm.slurm.allocation import is_alone

if TYPE_CHECKING:
    import torch


@dataclass
class _Installed:
    pid: int
    controller: Controller
    beside: contextlib.ExitStack
    """What else ends with it."""
    unasked: bool = False
    """By ``srun --preempt``, not by a call in the script."""


_lock = threading.Lock()
_installed: _Installed | None = None


def install(
    *,
    run_dir: str | os.PathLike[str] | None = None,
    signals: SignalPlan | None = None,
    gate: GateKind = "auto",
    model: torch.nn.Module | None = None,
    alone: bool | None = None,
    environ: Mapping[str, str] | None = None,
) -> Controller:
    """Make this process pausable at every operator, with no model and no change to the training
    loop.

    From now on SIGTSTP (``scontrol suspend``), SIGUSR1 and :meth:`Controller.pause` park it;
    SIGCONT, SIGUSR2 and :meth:`Controller.resume` let it go on. Earlier handlers are chained. May
    be called from any thread where the gate is native.

    Where ``srun --preempt`` made the process pausable already, this returns its controller, whose
    events go to ``run_dir`` from now on, and which leaves the other ranks for ``alone``.

    Args:
        run_dir: where the events go. Default: ``HYDROSLURM_RUN_DIR``; in a Slurm job
            ``hydroslurm-runs/JOBID`` in the folder it was submitted from; else a private folder
            that goes when the process ends.
        signals: which signal means what; default :class:`SignalPlan`, changed by
            ``HYDROSLURM_SIGNALS``.
        gate: ``native``, ``hooks`` (module boundaries only, and one rank), or ``auto``: native
            where it can be built.
        model: for the hooks gate, the model whose leaf modules are hooked; default: every module.
        alone: do not look for the other ranks of the job: a signal pauses and stops this one only.
            Default: ``HYDROSLURM_ALONE``, else False. For tasks that do not train together.
        environ: instead of ``os.environ``.

    Returns:
        The controller of this process.

    Raises:
        AlreadyInstalled: a second call without :func:`uninstall`.
        TorchMissing: torch cannot be imported.
        GateError: the native gate cannot be built or trusted, and was asked for or is needed:
            several ranks need it.
        InstallError: a handler could not be installed.
        UsageError: bad signals, or a bad ``HYDROSLURM_NVTX``, ``HYDROSLURM_VACATE`` or
            ``HYDROSLURM_LAUNCH_AHEAD_MS``; or other signals, or another gate, than ``srun
            --preempt`` has put in place.
    """
    global _installed
    environ = os.environ if environ is None else environ
    plan = (signals or SignalPlan()).with_environment(environ)
    autoload.stand_down()
    autoload.take_rank()
    world = _world_of_several(alone, environ)
    with _lock:
        if gives_way():
            live = _require_installed()
            _require_same(live.controller, plan, chosen_kind(gate, environ), world)
            live.unasked = False
            _change_folder(live.controller, plan, environ, run_dir=run_dir)
            if world is None:
                live.controller.part()
            elif live.controller.ranks is None:
                _join(live.controller, world, environ=environ, run_dir=run_dir)
            return live.controller
        if is_installed():
            raise AlreadyInstalled(
                "hydroslurm is installed in this process already; use hydroslurm.controller(), or "
                "hydroslurm.uninstall() first"
            )
        ranks = world.world_size if world is not None else 1
        _require_torch()
        # started with them held, or ignored: by the agent, or by one of ours further up
        above = autoload.rank_above(os.environ)
        held = signal.pthread_sigmask(signal.SIG_BLOCK, ()) | (above.signals if above else set())
        autoload.keep_alive(plan.killing() & held)
        controller, beside = _set_up(run_dir, plan, gate, model, environ, ranks=ranks)
        _installed = _Installed(os.getpid(), controller, beside)
        for one in numa.bindings:  # what was bound before there was a log
            _record_binding(one)
        if world is not None:
            _join(controller, world, environ=environ, run_dir=run_dir)
        atexit.register(_uninstall_at_exit)
        return controller


def install_unasked() -> None:
    """:func:`install` on behalf of ``srun --preempt``. Does nothing where there was a call already.

    Raises as :func:`install` does.
    """
    if not is_installed():
        install()
        _require_installed().unasked = True


def _require_same(live: Controller, plan: SignalPlan, gate: GateKind, world: World | None) -> None:
    """Refuse what cannot be changed while signals may arrive."""
    has, remedy = "", ""
    if plan != live.plan:
        has, remedy = "other signals", f"{SIGNALS_ENV}=NAME=SIGNAL,..."
    elif gate not in ("auto", live.gate.name):
        has, remedy = f"the {live.gate.name} gate", f"{GATE_ENV}={gate}"
    elif world is not None and live.gate.name == "hooks":
        has = f"the hooks gate, which holds one rank, and {world.world_size} pause together here"
        remedy = f"{GATE_ENV}=native"
    if has:
        raise UsageError(
            f"{autoload.PREEMPT_ENV} has made this process pausable with {has}. Choose for both "
            f"by {remedy}, or set {autoload.PREEMPT_ENV}=off"
        )


def _change_folder(
    live: Controller,
    plan: SignalPlan,
    environ: Mapping[str, str],
    *,
    run_dir: str | os.PathLike[str] | None,
) -> None:
    """Write into another run folder, or for another rank, if they are others than before."""
    identity, base = Identity.of(environ, plan.killing()), _registry_base(environ)
    journal = _journal(identity, _run_folder(run_dir, environ, base), environ, live.watch)
    if journal.log.path != live.journal.log.path:
        live.write_to(journal)
        _announce(base, journal, plan)


def _journal(
    identity: Identity, folder: RunDir | None, environ: Mapping[str, str], watch: Watch
) -> RankJournal:
    """It keeps nothing where there is no folder."""
    log = folder.rank_events(identity.rank) if folder else None
    status = folder.rank_status(identity.rank) if folder else None
    every_s = interval_s(environ)
    return RankJournal(
        identity, EventLog(log), StatusWriter(status, every_s=every_s, look=watch.look)
    )


def _set_up(
    run_dir: str | os.PathLike[str] | None,
    plan: SignalPlan,
    gate: GateKind,
    model: torch.nn.Module | None,
    environ: Mapping[str, str],
    *,
    ranks: int,
) -> tuple[Controller, contextlib.ExitStack]:
    """Everything that :func:`install` puts in place, or nothing of it."""
    identity = Identity.of(environ, plan.killing())
    base = _registry_base(environ)
    folder = _run_folder(run_dir, environ, base)
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as beside:
        if base is not None:
            beside.callback(registry.withdraw, base, os.getpid())
        opened = open_gate(gate, model=model, ranks=ranks, environ=environ)
        watch = Watch(environ, gate=opened, ranks=ranks)
        journal = _journal(identity, folder, environ, watch)
        controller = Controller(
            gate=opened,
            plan=plan,
            journal=journal,
            watch=watch,
            registry_base=base,
            environ=environ,
        )
        beside.enter_context(spawns_shielded(plan.pausing(), killing=plan.killing()))
        beside.enter_context(workers_shielded(plan.stopping()))
        beside.enter_context(wandb_shielded(plan.stopping() | plan.killing()))
        controller.start()
        undo.callback(controller.stop)
        _announce(base, journal, plan)
        if folder is not None and identity.rank == 0 and identity.job_id is not None:
            from hydroslurm.runtime import unsaved_warning

            beside.callback(unsaved_warning.watch(controller, folder, identity.job_id, environ))
        undo.pop_all()
        return controller, beside.pop_all()


def uninstall() -> int:
    """Let the process go on if it is paused, put the old handlers back, end the controller.

    Returns:
        How many of our handlers somebody else had replaced meanwhile; those are left alone.

    Raises:
        NotInstalled: nothing is installed in this process.
    """
    return _take_out()


def _take_out(*, replaced: int | None = None, error: BaseException | None = None) -> int:
    global _installed
    with _lock:
        ours = _require_installed()
        _installed = None
        atexit.unregister(_uninstall_at_exit)
        try:
            return ours.controller.stop(replaced=replaced, error=error)
        finally:
            ours.beside.close()


def controller() -> Controller:
    """The controller of this process.

    Raises:
        NotInstalled: nothing is installed in this process.
    """
    return _require_installed().controller


def is_installed() -> bool:
    """Whether this very process is pausable; False in a forked child of one that is."""
    return _installed is not None and _installed.pid == os.getpid()


def gives_way() -> bool:
    """Whether ``srun --preempt`` made this process pausable, and no call of the script's has yet
    asked for it."""
    return is_installed() and _require_installed().unasked


def set_step(step: int) -> None:
    """Tell the training step to the events; does nothing where nothing is installed."""
    if _installed is not None:
        _installed.controller.step = step


def nvtx_mark(message: str) -> None:
    """Mark a moment in the profile, in the domain ``hydroslurm`` and without a GPU, which
    ``torch.cuda.nvtx.mark`` needs. Without a profiler, or before :func:`install`, nothing happens.
    """
    if _installed is not None:
        _installed.controller.marks.message(message)


@contextlib.contextmanager
def installed(**options: object) -> Iterator[Controller]:
    """:func:`install` for the length of a ``with`` block."""
    mine = install(**options)  # type: ignore[arg-type]
    try:
        yield mine
    finally:
        if is_installed():
            uninstall()


def _record_binding(binding: numa.Binding) -> None:
    if is_installed():
        data = {
            "local_rank": binding.local_rank,
            "nodes": list(binding.nodes),
            "cpus": numa.format_list(binding.cpus),
            "message": binding.message,
        }
        controller().record(EventKind.NUMA_BOUND, data)


numa.observers.append(_record_binding)


def _require_installed() -> _Installed:
    if _installed is None or _installed.pid != os.getpid():
        raise NotInstalled(
            "hydroslurm is not installed in this process; call hydroslurm.install(), or wrap the "
            "model with "
            "hydroslurm.od_execution_wrapper(model)"
        )
    return _installed


def _uninstall_at_exit() -> None:
    """Slurm sends SIGTERM again, and a person's signal may come late. A process on its last steps
    must not die of it, for its status counts."""
    if not is_installed():
        return
    mine = controller()
    late = mine.plan.pausing() | mine.plan.stopping()
    mine.guarding = False
    replaced = None
    if mine.stop_request is not None:  # else the second SIGTERM could come while we uninstall
        replaced = mine.gate.check_handlers()  # by others: behind this, we do so ourselves
        _ignore(late)
    # of a script that has ended by it: atexit comes behind the traceback
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    _take_out(replaced=replaced, error=error)
    if mine.stop_request is not None:
        mine.output.guard()  # Python flushes them last; a failure would replace the exit status
    _ignore({signo for signo in late if signal.getsignal(signo) is signal.SIG_DFL})


def _ignore(signals: Collection[int]) -> None:
    for signo in signals:
        with contextlib.suppress(ValueError, OSError):  # not the main thread
            signal.signal(signo, signal.SIG_IGN)


def _world_of_several(alone: bool | None, environ: Mapping[str, str]) -> World | None:
    """The ranks that pause together; None where this one is alone, or to be."""
    world = World.from_environ(environ)
    if alone is None:
        alone = is_alone(environ)
    return None if alone or world.world_size == 1 else world


def _join(
    controller: Controller,
    world: World,
    *,
    environ: Mapping[str, str],
    run_dir: str | os.PathLike[str] | None = None,
) -> None:
    """Connect with the other ranks."""
    # a rank that is alone needs neither
    from hydroslurm.coordination.rendezvous import key_folder
    from hydroslurm.coordination.secret import find_secret

    environ = dict(environ)  # of now: they are looked for in a thread
    folder = key_folder(world, environ, run_dir=run_dir)
    secret = partial(find_secret, world, environ, folder=folder)
    controller.join(world, secret=secret, warn=_warn)


def _warn(text: str) -> None:
    """Also from a thread of ours, which a warning that is an error there would end."""
    with contextlib.suppress(RuntimeWarning):
        warnings.warn(f"hydroslurm: {text}", RuntimeWarning, stacklevel=4)


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise TorchMissing(
            f"torch cannot be imported ({error}); hydroslurm pauses between torch's operators. "
            "Install torch>=2.4 into this environment"
        ) from error


def _registry_base(environ: Mapping[str, str]) -> Path | None:
    try:
        return registry.folder(environ)
    except HydroslurmError as error:
        _warn(f"{error}; `--pid` cannot wait for answers")
        return None


def folder_of_job(environ: Mapping[str, str]) -> RunDir | None:
    """As :func:`run_folders.from_environment`, which is loaded in a job only."""
    if rundir.from_environment(environ) is None:
        return None
    from hydroslurm.slurm import run_folders

    return run_folders.from_environment(environ)


def _run_folder(
    given: str | os.PathLike[str] | None, environ: Mapping[str, str], base: Path | None
) -> RunDir | None:
    try:
        of_run = RunDir(Path(given)) if given is not None else folder_of_job(environ)
        if of_run is not None:
            mode = 0o700 if given is None else 0o775
            return RunDir(of_run.root.absolute()).claim(mode=mode)
    except HydroslurmError as error:
        # a pause needs nothing that is written there, so that the training is not refused
        _warn(
            f"{error}. This process can be paused all the same; its events go into a private "
            "folder that ends with it"
        )
    return RunDir(registry.private_events(base, os.getpid())) if base else None


def _announce(base: Path | None, journal: RankJournal, plan: SignalPlan) -> None:
    if base is None or journal.log.path is None:
        return
    pid = os.getpid()
    numbers = {name: value for name, value in vars(plan).items() if type(value) is int}
    entry = registry.Entry(
        pid=pid,
        started=registry.start_ticks(pid) or 0,
        rank=journal.identity.rank,
        events=str(journal.log.path),
        signals=numbers,
    )
    try:
        registry.announce(base, entry)
    except OSError as error:
        _warn(f"cannot write {base} ({error}); `--pid` cannot wait for answers")

"""What the writer of a loop can forget, found before it costs anything: that a run has to go on
from its checkpoint, that steps have to be counted, that a run's folder stays where it is, and that
a process has one run."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydroslurm.errors import UsageError
from hydroslurm.runtime import install as installation
from hydroslurm.training.objects import inside

if TYPE_CHECKING:
    from hydroslurm.runtime.controller import Controller
    from hydroslurm.training.run import Run


class LoopWatch:
    """Whether the optimizers of a run have stepped, and whether somebody counts the steps.

    Optimizers are told apart and hooked only until the loop has shown at its safe points that it
    counts. Their own counters would not do: SGD has none, others have one for each parameter, which
    a load replaces.

    Attributes:
        on: nobody has been seen to count yet.
    """

    def __init__(self) -> None:
        self.on = True
        self._hooks: list[Any] = []
        self._steps: list[int] = []
        self._seen: list[int] = []
        self._uncounted: list[int] = []
        self._begun_at: int | None = None

    def add(self, thing: Any) -> None:
        """Watch this object, if it is an optimizer whose hooks torch calls."""
        if not self.on or not hasattr(getattr(type(thing), "step", None), "__wrapped__"):
            return  # a wrapper around an optimizer may take hooks and never call them
        if not hasattr(thing, "_optimizer_step_post_hooks"):
            return
        steps, place = self._steps, len(self._steps)

        def count(*_: Any) -> None:
            steps[place] += 1

        steps.append(0)
        self._seen.append(0)
        self._uncounted.append(0)
        self._hooks.append(thing.register_step_post_hook(count))

    @property
    def may_have_trained(self) -> bool:
        """Whether an optimizer has stepped, or there is none by which that could be seen."""
        return not self._steps or any(self._steps)

    def begin(self, step: int, *, in_loop: bool) -> None:
        """The run begins at this step; in the middle of a loop, or after what was a warm-up."""
        self._begun_at = step
        if not in_loop:
            self._seen = list(self._steps)

    def at_safe_point(self, step: int) -> None:
        """A loop of one's own says that a step is complete.

        One optimizer has to step twice, each time with a safe point behind it: a loop that
        accumulates, evaluates, or trains two networks in turns calls safe points at one step too.

        Raises:
            UsageError: one has stepped and stepped, and the count is what it was at the beginning.
        """
        if step != self._begun_at:
            self.close()
            return
        trained = [now > seen for now, seen in zip(self._steps, self._seen, strict=True)]
        self._seen = list(self._steps)
        self._uncounted = [n + one for n, one in zip(self._uncounted, trained, strict=True)]
        if max(self._uncounted, default=0) < 2:
            return
        raise UsageError(
            f"the optimizer has stepped before each of two safe points, and run.step is {step} as "
            "at the beginning: nothing would be saved, because checkpoints are named after steps. "
            "Count each step before its safe point: run.step += 1; run.safe_point(). Where a step "
            "is not complete, call run.check_stop() instead"
        )

    def close(self) -> None:
        """No hook stays behind."""
        self.on = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class FolderWatch:
    """Whether the folder of a run is still the one that it began in."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._began_in = _identity(root)

    def look(self) -> str:
        """What a person has to know, once; else empty. Saves make a missing folder anew."""
        now = _identity(self._root)
        if now == self._began_in or self._began_in is None:
            return ""
        self._began_in = None
        return (
            f"{self._root} was renamed or removed while this run trains. It is made anew, and what "
            "is saved from now on goes there; what was saved before is not in it. Let a folder be "
            "until its run has ended"
        )


def _identity(root: Path) -> tuple[int, int] | None:
    try:
        found = root.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


# --- graphs that a resume compiles in another order
# ------------------------------------------------------------------------------------------------

_RECOMPILES = (
    "torch.compile compiles this model again, for batches of any size, at the smaller last batch "
    "of an epoch ({last} of {whole}); a run that was stopped begins with the graph for whole "
    "batches, and may differ in the last bits. torch.compile(model, dynamic=False) or the loader's "
    "drop_last=True makes them equal"
)


def recompiles(model: Any, loader: Any) -> str | None:
    """What to say of a compiled model whose graphs depend on the batches that this process has
    seen; None where they do not, or where that cannot be told."""
    context = None
    while model is not None:
        context = getattr(model, "dynamo_ctx", None) or context
        model = inside(model)
    if context is None or getattr(context, "_dynamic", False) is not None:
        return None
    whole = getattr(loader, "batch_size", None)
    if not isinstance(whole, int) or getattr(loader, "drop_last", True):
        return None
    try:
        last = len(loader.sampler) % whole
    except (TypeError, AttributeError):  # a stream
        return None
    return _RECOMPILES.format(last=last, whole=whole) if last else None


# --- one per process
# ------------------------------------------------------------------------------------------------

_open: tuple[int, weakref.ref[Run], weakref.ref[Controller]] | None = None


def require_place() -> None:
    """Whether a Run may be made here and now.

    Raises:
        UsageError: not in the main thread; or another one is open, which is named.
    """
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        raise UsageError(
            f"Run(...) was called in thread {thread.name!r}; wanted the main thread, where Python "
            "handles the signals that stop a run. Make it there, train there, and leave the other "
            "work to threads"
        )
    first = _first()
    if first is not None:
        raise UsageError(
            f"this process has a Run already, in {first.dir.root}, which is not closed: both would "
            "answer one SIGTERM, and the process can leave once. Put what belongs together into "
            "one, Run(extra={name: object}); of two in sequence close() the first"
        )


def opened(run: Run, controller: Controller) -> None:
    """This is the one of the process, until it is closed."""
    global _open
    _open = os.getpid(), weakref.ref(run), weakref.ref(controller)


def closed(run: object) -> None:
    """There may be another one now."""
    global _open
    if _open is not None and _open[1]() is run:
        _open = None


def _first() -> Run | None:
    """The open one; a forked child has none, nor has a process whose signals were given back."""
    if _open is None or _open[0] != os.getpid() or not installation.is_installed():
        return None
    _, run, controller = _open
    return run() if controller() is installation.controller() else None

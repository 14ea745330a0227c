"""``hydroslurm top``: all my jobs live."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from hydroslurm.cli.shared import AllUsers, AsJsonLines, OnlyPartition
from hydroslurm.core.garbage import without_gc
from hydroslurm.core.threads import thread

if TYPE_CHECKING:
    from rich.console import Group

    from hydroslurm.observe.watcher import View, Watcher

EVERY_S = 5.0
LEAST_EVERY_S = 0.2
_SLOW_S = 5.0
"""Delay of an answer after which the screen says that Slurm is late."""
_PIPE_CELLS = 300
"""Enough width for all columns."""


def top(
    jobs: Annotated[
        list[str] | None, typer.Argument(help="Only these jobs, or elements of these arrays.")
    ] = None,
    all_users: AllUsers = False,
    partition: OnlyPartition = None,
    interval_s: Annotated[
        float | None,
        typer.Option(
            "--interval",
            "-n",
            help=f"Seconds between two requests to Slurm. Default: {EVERY_S:g}; in a pipe: once.",
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print once; the default in a pipe.")
    ] = False,
    as_json: AsJsonLines = False,
) -> None:
    """Show all my jobs live.

    State, ranks parked, step and rate, newest checkpoint, preemptions, time left, and what would be
    lost if they were preempted now. One request to Slurm each time, however many jobs there are.
    """
    from hydroslurm.core.jobid import JobId
    from hydroslurm.core.trust import user_name
    from hydroslurm.errors import UsageError
    from hydroslurm.observe.watcher import Watcher
    from hydroslurm.slurm.client import RetryPolicy, open_client

    if interval_s is not None and not interval_s >= LEAST_EVERY_S:
        raise UsageError(f"--interval {interval_s:g}: wanted {LEAST_EVERY_S:g} or more seconds")
    named = [JobId.parse(text) for text in jobs or ()]
    has_screen = not once and not as_json and sys.stdin.isatty() and sys.stdout.isatty()
    is_only_view = once or (interval_s is None and not has_screen)
    watcher = Watcher(
        # wait for an absent controller by asking again at the next interval
        open_client(retry_policy=RetryPolicy(give_up_after_s=0.0)),
        user=None if all_users or named else user_name(),
        partition=partition,
        ids=named,
    )
    every_s = EVERY_S if interval_s is None else interval_s
    if has_screen:
        _Screen(watcher, every_s=every_s).run()
        return
    _print_views(watcher, every_s=None if is_only_view else every_s, as_json=as_json)


@without_gc()  # looking and printing make no cycles
def _print_views(watcher: Watcher, *, every_s: float | None, as_json: bool) -> None:
    """Print once, or every ``every_s``, for programs.

    Raises:
        SlurmError: Slurm did not answer the only request.
    """
    from hydroslurm.errors import ControllerUnreachable

    with contextlib.suppress(KeyboardInterrupt):
        while True:
            view = watcher.look()
            if view.error is not None and every_s is None:
                raise ControllerUnreachable(view.error)
            _print_view(view, as_json=as_json)
            if every_s is None:
                if view.missing:
                    raise typer.Exit(1)
                return
            time.sleep(every_s)


def _print_view(view: View, *, as_json: bool) -> None:
    from hydroslurm.core.files import clean
    from hydroslurm.observe import table

    if view.error is not None:
        typer.echo(f"hydroslurm: Slurm does not answer: {clean(view.error)}", err=True)
    for job_id in view.missing:
        typer.echo(f"hydroslurm: there is no job {job_id}", err=True)
    if as_json:
        moment = {"epoch_s": view.epoch_s}
        lines = [json.dumps(moment | table.as_json(table.TOP, row)) for row in view.rows]
    else:
        width = os.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_CELLS
        head, lines = table.layout(table.TOP, view.rows, width)
        lines = [head, *lines]
    if lines:
        typer.echo("\n".join(lines))  # flushes, so once for all


class _Screen:
    """The alternate screen, the keys, and a thread that asks Slurm, so that ``q`` works even when
    Slurm is slow."""

    def __init__(self, watcher: Watcher, *, every_s: float) -> None:
        self._watcher = watcher
        self._every_s = every_s
        self._view: View | None = None
        self._error: BaseException | None = None
        self._first = 0
        self._due_mono_s = time.monotonic()
        self._reads, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)

    def run(self) -> None:
        """Run until ``q``, Ctrl-C or a signal, then restore the terminal.

        Raises:
            SlurmMissing: there is no Slurm here.
        """
        from rich.console import Console
        from rich.live import Live

        console = Console()
        thread(self._ask, name="hydroslurm-top").start()
        with (
            contextlib.suppress(KeyboardInterrupt),
            _keys(),
            self._signals(),
            Live(console=console, screen=True, auto_refresh=False, transient=True) as live,
        ):
            while self._error is None:
                # the current size, not COLUMNS of when we started
                size = os.get_terminal_size(sys.stdout.fileno())
                console.size = size
                live.update(self._shown(max(1, size.columns), max(1, size.lines)), refresh=True)
                if self._wait(size.lines):
                    return
        if self._error is not None:
            raise self._error

    def _shown(self, width: int, height: int) -> Group:
        from hydroslurm.observe.screen import page_rows, screen

        count = len(self._view.rows) if self._view else 0
        self._first = max(0, min(self._first, count - page_rows(height)))
        return screen(
            self._view,
            width=width,
            height=height,
            first=self._first,
            now_epoch_s=time.time(),
            overdue=time.monotonic() > self._due_mono_s + _SLOW_S,
        )

    def _wait(self, height: int) -> bool:
        """Wait until there is something new to show; return True to quit."""
        from hydroslurm.observe.screen import page_rows

        late_s = self._due_mono_s + _SLOW_S - time.monotonic()
        poller = select.poll()
        poller.register(0, select.POLLIN)
        poller.register(self._reads, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(1000 * max(1.0, late_s))}
        if self._reads in ready:
            os.read(self._reads, 4096)
        if 0 not in ready:
            return False
        keys = os.read(0, 1024)
        if not keys or b"q" in keys or b"Q" in keys:
            return True
        page = page_rows(height)
        lines = {b"j": 1, b"\x1b[B": 1, b"k": -1, b"\x1b[A": -1}
        pages = {b" ": page, b"\x1b[6~": page, b"b": -page, b"\x1b[5~": -page}
        self._first += sum(n * keys.count(key) for key, n in (lines | pages).items())
        return False

    def _ask(self) -> None:
        try:
            while True:
                self._view = self._watcher.look()
                self._due_mono_s = time.monotonic() + self._every_s
                self._wake()
                time.sleep(self._every_s)
        except BaseException as error:
            self._error = error
            self._wake()

    def _wake(self, *_: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wakes, b".")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Redraw at a new size; restore the terminal when a signal ends us. Ignore Ctrl-Z, which
        would leave the shell on our screen."""

        def leave(signo: int, _: object) -> None:
            raise SystemExit(128 + signo)

        wanted: dict[signal.Signals, Callable[[int, object], object] | signal.Handlers] = {
            signal.SIGWINCH: self._wake,
            signal.SIGTERM: leave,
            signal.SIGHUP: leave,
            signal.SIGTSTP: signal.SIG_IGN,
        }
        before = {signo: signal.signal(signo, act) for signo, act in wanted.items()}
        try:
            yield
        finally:
            for signo, act in before.items():
                signal.signal(signo, act)


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Read single keys without echo; Ctrl-C remains a signal."""
    import termios
    import tty

    before = termios.tcgetattr(0)
    tty.setcbreak(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)

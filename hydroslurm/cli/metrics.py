"""``hydroslurm metrics``: Prometheus metrics of all jobs."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hydroslurm.cli.shared import AllUsers, OnlyPartition

if TYPE_CHECKING:
    from hydroslurm.observe.metrics import JobCollector

EVERY_S = 15.0
LEAST_EVERY_S = 1.0


def metrics(
    textfile: Annotated[
        Path | None,
        typer.Option(help="Write to this *.prom file, for node_exporter's textfile collector."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Serve on this port of 127.0.0.1; 0: any."),
    ] = None,
    every_s: Annotated[
        float | None,
        typer.Option(
            "--every",
            help="Seconds. With --textfile: rewrite the file at this interval (default: write it "
            f"once). With --port: ask Slurm no more often than this (default: {EVERY_S:g}).",
        ),
    ] = None,
    all_users: AllUsers = False,
    partition: OnlyPartition = None,
) -> None:
    """Export Prometheus metrics of my jobs.

    Step, rate, ranks parked, newest checkpoint, preemptions, how long ranks took to park. One
    request to Slurm each time, however many jobs there are. Without --textfile or --port, print
    them once.
    """
    from hydroslurm.core.trust import user_name
    from hydroslurm.errors import UsageError
    from hydroslurm.observe.watcher import Watcher
    from hydroslurm.slurm.client import RetryPolicy, open_client

    try:
        from hydroslurm.observe.metrics import JobCollector
    except ImportError as error:
        raise UsageError(
            f"hydroslurm metrics needs the package prometheus-client ({error}); "
            "pip install 'hydroslurm[metrics]'"
        ) from None
    if textfile is not None and port is not None:
        raise UsageError("give --textfile or --port, not both")
    if every_s is not None and not every_s >= LEAST_EVERY_S:
        raise UsageError(f"--every {every_s:g}: wanted {LEAST_EVERY_S:g} or more seconds")
    if every_s is not None and textfile is None and port is None:
        raise UsageError("--every goes with --textfile or --port")
    collector = JobCollector(
        Watcher(
            open_client(retry_policy=RetryPolicy(give_up_after_s=0.0)),
            user=None if all_users else user_name(),
            partition=partition,
            policies=False,
        ),
        every_s=0.0 if textfile is not None else EVERY_S if every_s is None else every_s,
    )
    if port is not None:
        _serve(collector, port)
    else:
        _write(collector, textfile, every_s)


def _write(collector: JobCollector, textfile: Path | None, every_s: float | None) -> None:
    """Write once, or every ``every_s``.

    Raises:
        RunFolderError: the file cannot be written.
        ControllerUnreachable: Slurm did not answer the last request.
    """
    from prometheus_client import generate_latest, write_to_textfile

    from hydroslurm.errors import ControllerUnreachable, RunFolderError

    registry = collector.registry()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            if textfile is None:
                typer.echo(generate_latest(registry).decode(), nl=False)
            else:
                try:
                    write_to_textfile(str(textfile), registry)  # atomic, by a rename
                except OSError as error:
                    raise RunFolderError(f"cannot write {textfile}: {error.strerror}") from error
            if every_s is None:
                break
            time.sleep(every_s)
    if collector.error is not None:
        raise ControllerUnreachable(collector.error)


def _serve(collector: JobCollector, port: int) -> None:
    """Serve until Ctrl-C.

    Raises:
        UsageError: the port is not available.
    """
    from prometheus_client import start_http_server

    from hydroslurm.errors import UsageError

    try:
        server, thread = start_http_server(port, addr="127.0.0.1", registry=collector.registry())
    except OSError as error:
        raise UsageError(f"--port {port}: {error.strerror}; choose another, or 0 for any") from None
    typer.echo(f"serving http://127.0.0.1:{server.server_port}/metrics")
    with contextlib.suppress(KeyboardInterrupt):
        thread.join()
    server.shutdown()

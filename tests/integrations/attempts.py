"""The attempts of a training as forks of a process that has its framework loaded.

Run as a program, ``attempts.py FOLDER RANKS STOPS SCRIPT ARGUMENT...``, it runs a script once from
end to end in FOLDER/whole, and once stopped and resumed in FOLDER/stopped, and prints the exit
statuses of both as JSON. Each attempt is what ``HYDROSLURM_PREEMPT=requeue python SCRIPT`` would
be; ``hydroslurm prove``'s recorder writes its optimizer steps into ``attempt1``, ``attempt2`` ...,
and its output is in ``out-RANK``. What STOPS may be stands in stops.py.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import random
import runpy
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import stops as places
import torch
from processes import free_port
from torch.nn.parallel import DistributedDataParallel

from hydroslurm.prove import recorder
from hydroslurm.prove.updates import LIMIT_FILE, PROVE_ENV
from hydroslurm.runtime import autoload

STOPPED = 75
"""The exit status of an attempt that was stopped and is to be started again."""
MOST_ATTEMPTS = 100


def attempts(
    attempt: Callable[[str, Path, str], None],
    name: str,
    place: Path,
    stops: Iterable[str],
    *,
    world: int = 1,
    notes: str = "notes*",
) -> tuple[list[int], list[str]]:
    """Make attempts at a scene in this folder, each stopped as told, until one ends by itself.

    Args:
        world: how many ranks make each attempt, with torchrun's variables if there are several.
        notes: the files in the folder that they note lines in.

    Returns:
        The exit statuses of all ranks, one attempt after the other, and the lines of all notes.
    """
    exits: list[int] = []
    for number, stop in enumerate(stops, 1):
        records = place / f"attempt{number}"
        records.mkdir(parents=True, exist_ok=True)
        (records / LIMIT_FILE).touch()
        environ = torchrun(world, f"{place}-{number}") if world > 1 else [{}]

        def call(
            rank: int, stop: str = stop, environ: list[dict[str, str]] = environ,
            records: Path = records,
        ) -> None:  # fmt: skip
            os.environ.update(environ[rank], **{PROVE_ENV: str(records)})
            attempt(name, place, stop)

        statuses = _forked(call, world)
        exits += statuses
        if not set(statuses) <= {STOPPED, -signal.SIGKILL}:
            break
    paths = sorted(place.glob(notes))
    return exits, [line for path in paths for line in path.read_text().splitlines()]


def torchrun(world: int, run_id: str) -> list[dict[str, str]]:
    """What torchrun sets for each rank of a node."""
    port = str(free_port())
    return [
        {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0",
            "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": run_id,
        }
        for rank in range(world)
    ]  # fmt: skip


def printed(lines: Iterable[str]) -> list[str]:
    """What a script shows, in lines that begin with "="."""
    return [line[2:] for line in lines if line.startswith("= ")]


def _forked(call: Callable[[int], Any], world: int) -> list[int]:
    """The exit statuses of children that do this, by rank."""
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                call(rank)
                status = 0
            except SystemExit as leaving:
                status = int(leaving.code or 0)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def run_script(arguments: list[str], _: str, place: Path, stop: str) -> None:
    """Be one attempt at a script."""
    begin(place, stop)
    sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()


def begin(place: Path, stop: str) -> None:
    """What Python's start does in a script that ``HYDROSLURM_PREEMPT=requeue`` is set for."""
    os.environ.update(HYDROSLURM_PREEMPT="requeue", HYDROSLURM_RUN_DIR=str(place / "run"))
    output = place / f"out-{os.environ.get('RANK', '0')}"
    os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 1)
    (place / "work").mkdir(exist_ok=True)
    os.chdir(place / "work")
    torch.set_num_threads(1)
    init = DistributedDataParallel.__init__
    # these models are so small that all of one would else be in one bucket, before and after
    DistributedDataParallel.__init__ = lambda *args, **kw: init(  # type: ignore[method-assign]
        *args, **{**kw, "bucket_cap_mb": 0.0001, "find_unused_parameters": False}
    )
    random.seed(0)  # else it is another one in each fork
    recorder.start()
    del os.environ[PROVE_ENV]  # else it would wait for the import of torch
    places.arm(stop)
    autoload.start()


def main(folder: Path, world: str, told: str, *arguments: str) -> None:
    warnings.filterwarnings("ignore")
    script = functools.partial(run_script, list(arguments))
    each, is_every, _ = told.partition("...")
    stops = itertools.repeat(each, MOST_ATTEMPTS) if is_every else (*told.split(), "")
    found = {
        run: attempts(script, "", folder / run, those, world=int(world))[0]
        for run, those in (("whole", ("",)), ("stopped", stops))
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

"""The main job, from start to end: `make demo`.

Act 1, paused in place: an unmodified training is suspended and resumed, and parked by gang
scheduling for an urgent job. Act 2, saved and requeued: a training is stopped by an urgent job, by
`hydroslurm requeue` and by an operator's, and goes on each time where it was. Act 3, elastic: a
training loses a node to an urgent job, trains on without it, and gets another. Each act starts a
private Slurm on this machine. Acts 1 and 2 show that what was interrupted ends with the very bits
of what was left alone, act 3 that every sample was trained on once.

    --act 1   only one of the three
    --local   without Slurm: the same trainings as plain processes, paused and stopped by their pid
    --site    on the Slurm of this site instead of a private one; asks you for the act, because a
              partition either suspends its jobs (1) or requeues them (2), and for two partitions
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import demo_elastic
import demo_pause
import demo_stop
from demo_stage import console, last_words, pace, run_to_end, say
from rich.markup import escape
from submitit.core.utils import FailedJobError, UncompletedJobError

from hydroslurm.devcluster.programs import missing, search_path
from hydroslurm.errors import HydroslurmError, UsageError

ACTS = {
    1: "act 1: paused in place",
    2: "act 2: saved and requeued",
    3: "act 3: elastic, nodes come and go",
}


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse(arguments)
    folder = (chosen.dir / time.strftime("%Y%m%d-%H%M%S")).absolute()
    if not (chosen.local or chosen.site) and missing(search_path(os.environ.get("PATH"))):
        say("[yellow]Slurm is not installed here: the demo goes on as local processes[/]")
        chosen.local = True
    acts = [chosen.act] if chosen.act else [act for act in ACTS if act < 3 or not chosen.local]
    build_gate()
    return 0 if all(play(act, chosen, folder / f"act-{act}") for act in acts) else 1


def build_gate() -> None:
    """Before the first job, which else would compile it while everybody waits."""
    say("building the gate for this torch, unless there is one")
    try:
        say(escape(run_to_end("-m", "hydroslurm.cli", "gate", "build").strip()))
    except HydroslurmError as error:
        say(f"[yellow]no native gate:[/] {escape(str(error))}")


def play(act: int, chosen: argparse.Namespace, folder: Path) -> bool:
    """One act; True when it kept its promise."""
    folder.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    console.rule(f"[bold]{ACTS[act]}[/]")
    try:
        say(f"Python, torch and a first training step take {pace.measure():.1f} s here")
        kept = scene(act, chosen, folder)()
    except (HydroslurmError, UsageError) as error:
        failure = str(error)
    except (UncompletedJobError, FailedJobError) as error:
        failure = f"{error}. {last_words(folder / 'runs')}"
    else:
        say(f"act {act} took {time.monotonic() - began_s:.0f} s")
        return kept
    console.print(f"[red]act {act} failed, in {folder}:[/] {escape(failure)}", soft_wrap=True)
    return False


def scene(act: int, chosen: argparse.Namespace, folder: Path) -> Callable[[], bool]:
    """Where the act plays."""
    if act == 1:
        size = {"iterations": chosen.iterations}
        if chosen.local:
            return lambda: demo_pause.local_act(folder, **size)
        if chosen.site:
            return lambda: demo_pause.slurm_act(
                folder, low=chosen.low, urgent=chosen.urgent, **size
            )
        return lambda: demo_pause.private_act(folder, **size)
    size = {"epochs": chosen.epochs}
    if act == 3:
        if chosen.site:
            return lambda: demo_elastic.slurm_act(
                folder, low=chosen.low, urgent=chosen.urgent, **size
            )
        return lambda: demo_elastic.private_act(folder, **size)
    if chosen.local:
        return lambda: demo_stop.local_act(folder, **size)
    if chosen.site:
        return lambda: demo_stop.site_act(folder, low=chosen.low, urgent=chosen.urgent, **size)
    return lambda: demo_stop.private_act(folder, **size)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--act", type=int, choices=ACTS, help="only this one")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--local", action="store_true", help="without Slurm")
    where.add_argument("--site", action="store_true", help="on this site's Slurm")
    parser.add_argument("--low", help="with --site: the preemptible partition")
    parser.add_argument("--urgent", help="with --site: the partition that preempts it")
    parser.add_argument(
        "--dir", type=Path, default=Path(".hydroslurm/demo"), help="default: %(default)s"
    )
    parser.add_argument(
        "--iterations", type=int, default=3000, help="steps of act 1, default %(default)s"
    )
    parser.add_argument(
        "--epochs", type=int, default=30, help="of acts 2 and 3, default %(default)s"
    )
    chosen = parser.parse_args(arguments)
    if chosen.local and chosen.act == 3:
        parser.error("--act 3 needs Slurm, whose jobs its members are")
    if chosen.site and not (chosen.act and chosen.low and chosen.urgent):
        parser.error("--site needs --act 1, 2 or 3, --low PARTITION and --urgent PARTITION")
    return chosen


if __name__ == "__main__":
    sys.exit(main())

"""``hydroslurm batch | template``: what a batch script runs, and batch scripts to start from."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from hydroslurm.cli.shared import ScriptArguments, echo_table

TEMPLATES = Path(__file__).parent.parent / "templates"
"""A link to sbatch/ in a checkout; in a wheel, the files."""
EXAMPLES = TEMPLATES.with_name("examples")
"""Like TEMPLATES."""
_COMMAND = re.compile(r'examples/\w+\.py "\$@"$', re.MULTILINE)
_NAME = re.compile(r"^(#SBATCH --(?:job-name|output)=).*?(-%j\.out)?$", re.MULTILINE)


def batch(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND", help="srun and its arguments, after --.", show_default=False
        ),
    ] = None,
    ended: Annotated[
        int | None,
        typer.Option(
            metavar="STATUS", help="Decide for ranks that have ended with this status; no COMMAND."
        ),
    ] = None,
) -> None:
    """Run srun in a batch script; requeue what its ranks cannot.

    exec hydroslurm batch -- srun python train.py

    The job is requeued if the ranks saved and could not ask for it (status 75), and if a preemption
    ended them before they could save (143), while Python still imports for example; never if it was
    cancelled, or if a rank failed. Where Slurm does it by itself, it is left to Slurm. Exits with
    the status of COMMAND.

    SIGTERM, SIGURG, SIGUSR1 and SIGUSR2 that reach the batch shell alone (--signal=B:..., scancel
    --batch) are passed on to the ranks. HYDROSLURM_PREEMPT=requeue is set for them, unless the
    variable is there.
    """
    from hydroslurm.errors import UsageError
    from hydroslurm.jobs.launch.batch import requeue_if_due, run_batch

    if (ended is None) == (not command):
        raise UsageError("wanted a command: hydroslurm batch -- srun python train.py")
    status = requeue_if_due(ended, os.environ) if ended is not None else 0
    sys.exit(run_batch(command, os.environ) if command else status)


def template(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Which one; without it all are listed.")
    ] = None,
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="What a batch script is to run.")
    ] = None,
    arguments: ScriptArguments = None,
) -> None:
    """Print a batch script, an example or the settings of a site.

    hydroslurm template requeue train.py --epochs 30 > job.sbatch

    sbatch --partition low job.sbatch

    hydroslurm template train_run.py > train.py

    Without SCRIPT a batch script runs one of the examples. The others are the examples, lines of
    slurm.conf for partitions and QOS, and job_submit.lua.
    """
    from hydroslurm.errors import UsageError

    shipped = [path for path in TEMPLATES.iterdir() if path.is_file() and path.suffix not in _NOT]
    examples = [*EXAMPLES.glob("train*.py"), *EXAMPLES.glob("*.yaml")]
    files = {path.name: path for path in (*sorted(shipped), *sorted(examples))}
    if name is None:
        echo_table((file, _about(path)) for file, path in files.items())
        return
    wanted = next((n for n in (name, f"{name}.sbatch", f"{name}.conf") if n in files), None)
    if wanted is None:
        raise UsageError(f"there is no template {name!r}; there are {', '.join(files)}")
    path = files[wanted]
    text = path.read_text()
    if script is None:
        typer.echo(text, nl=False)
        return
    if path.suffix != ".sbatch":
        raise UsageError(f"{path.name} runs no script; wanted one of the .sbatch templates")
    if not Path(script).is_file():
        raise UsageError(f"there is no script {script!r} here")
    typer.echo(_for_script(text, script, arguments or []), nl=False)


_NOT = (".md", ".py")


def _about(path: Path) -> str:
    """Return the first sentence of a template's first comment, on one line."""
    lines = path.read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if not line.startswith("#!"))
    words = " ".join(line.lstrip('#- "') for line in lines[first : first + 3])
    return re.split(r"(?<=\.) ", words)[0]


def _for_script(text: str, script: str, arguments: list[str]) -> str:
    """Put this script and this environment into a batch script, in place of the example's."""
    command = shlex.join([script, *arguments]) + ' "$@"'
    text = _COMMAND.sub(lambda _: command, text)
    stem = re.sub(r"[^\w.-]", "_", Path(script).stem)
    text = _NAME.sub(lambda found: f"{found[1]}{stem}{found[2] or ''}", text)
    text = text.replace("sbatch/nsys_profile.sh", shlex.quote(str(TEMPLATES / "nsys_profile.sh")))
    return text.replace("$PWD/.venv/bin", shlex.quote(str(Path(sys.executable).parent)))

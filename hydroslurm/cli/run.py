"""``hydroslurm run -- python train.py``: what ``srun --preempt`` does, without Slurm."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Everything from the command on belongs to the command."""


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="With its arguments, behind --.")
    ],
    mode: Annotated[
        str,
        typer.Option(
            metavar="pause|requeue",
            help="requeue is for scripts with a hydroslurm.Run, which may also be stopped: they "
            "save and leave. SIGTERM ends any other script in both modes.",
        ),
    ] = "pause",
) -> None:
    """Run an unmodified PyTorch program so that it can be paused at every operator.

    hydroslurm run -- python train.py --lr 0.1

    hydroslurm run -- torchrun --nproc-per-node=2 train.py

    The program takes the place of this process: same pid, same terminal, its own exit status.
    hydroslurm pause --pid PID (or Ctrl-Z, or kill -USR1 PID) parks it between two operators,
    hydroslurm resume --pid PID lets it go on. Of torchrun's program the pids are those of its
    workers. DataLoader workers are left alone.

    The Python that it runs in must have hydroslurm installed. HYDROSLURM_PREEMPT=pause in the
    environment of any command does the same, and srun --preempt sets that for a job.
    """
    import shutil

    from hydroslurm.errors import UsageError
    from hydroslurm.runtime.autoload import MODES, PREEMPT_ENV, TAKEN_ENV, hold, killing

    if mode not in MODES:
        raise UsageError(f"--mode {mode!r} is not known; wanted {' or '.join(MODES)}")
    program = shutil.which(command[0])
    if program is None:
        raise UsageError(f"there is no program {command[0]!r} on the PATH")
    os.environ[PREEMPT_ENV] = mode
    os.environ.pop(TAKEN_ENV, None)
    if os.path.basename(program).startswith("python"):  # noqa: PTH119 - the name as it was given
        _require_hook(program)
    hold(killing(os.environ))
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(program, command)
    except OSError as error:
        raise UsageError(f"{program} cannot be run: {error.strerror}") from error


def _require_hook(program: str) -> None:
    """Make sure that this Python looks for what was just put into the environment: one that does
    not would run the program as if nothing had been asked for.

    Raises:
        UsageError: it does not.
    """
    import subprocess

    from hydroslurm.errors import UsageError

    looks = "import sys; sys.exit('hydroslurm.runtime.autoload' not in sys.modules)"
    if subprocess.run([program, "-c", looks], capture_output=True, check=False).returncode == 0:
        return
    raise UsageError(
        f"{program} has hydroslurm not installed, so that the program would run as ever. Install "
        f"it there ({program} -m pip install hydroslurm), or use a Python that has it; this is "
        f"{sys.executable}"
    )

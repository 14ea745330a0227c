"""What submitit runs in each rank: pausing first, then the user's code.

These values are pickled at submission and called in the rank, after submitit has installed its own
handlers for SIGTERM, SIGCONT and its preemption signal. Ours go in after them and chain to them.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission

from hydroslurm import rundir
from hydroslurm.errors import LaunchError

SUBMITIT_SIGNAL = "URG"
"""submitit's preemption signal, moved away from USR2: Slurm accepts it, and a process without a
handler ignores it."""


@dataclass(frozen=True)
class InRank:
    """A callable wrapped so that it is pausable from its first operator on.

    Attributes:
        function: the user's.
        root: the run folder; for a task of a job array the folder that holds those of all tasks.
        is_array: this is one task of an array.
    """

    function: Callable[..., Any]
    root: Path
    is_array: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.run_dir(os.environ)
        os.environ[rundir.RUN_DIR_ENV] = str(run)
        from hydroslurm.runtime.install import installed

        with installed(run_dir=run):
            return self.function(*args, **kwargs)

    def checkpoint(self, *args: Any, **kwargs: Any) -> DelayedSubmission | None:
        """What submitit asks for at its signal; never called once a ``Run`` has taken that over.

        A function with a ``checkpoint`` of its own decides what runs next, or with None that
        nothing does; any other one is called again as it was.
        """
        own = getattr(self.function, "checkpoint", None)
        if own is None:
            return DelayedSubmission(self, *args, **kwargs)
        following: DelayedSubmission | None = own(*args, **kwargs)
        if following is not None:
            following.function = replace(self, function=following.function)
        return following

    def run_dir(self, environ: Mapping[str, str]) -> Path:
        """The run folder of the rank that has this environment."""
        if not self.is_array:
            return self.root
        return self.root / environ["SLURM_ARRAY_TASK_ID"]


@dataclass(frozen=True)
class Script:
    """A Python script, or a module, run as if by ``python``.

    Attributes:
        target: the script's path, or the module's name.
        arguments: what comes after it on the command line.
        is_module: ``python -m`` instead of ``python``.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def name(self) -> str:
        return self.target if self.is_module else Path(self.target).stem

    def __call__(self) -> None:
        """Run it; an exit status that is not 0 ends the rank with the same status.

        Raises:
            LaunchError: the script cannot be seen from this node.
        """
        if not self.is_module and not Path(self.target).is_file():
            raise LaunchError(
                f"the script {self.target} cannot be seen on this node; put it on a file system "
                "that all nodes share"
            )
        sys.argv = [self.target, *self.arguments]
        try:
            if self.is_module:
                sys.path.insert(0, str(Path.cwd()))
                runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(self.target).resolve().parent))
                runpy.run_path(self.target, run_name="__main__")
        except SystemExit as leaving:
            # submitit takes any SystemExit for a job that was cut off; a script that says exit(0)
            # has ended well
            if leaving.code not in (0, None):
                raise

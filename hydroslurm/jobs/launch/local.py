"""``Executor(folder, cluster="local")`` and ``"debug"``: the same calls where there is no Slurm.

submitit runs the function: in processes of this machine, or within ``job.result()`` in this very
one. What is added is what the ranks of a Slurm job get: a run folder, pausing, and the warning
signal moved to SIGURG.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any, Literal

import submitit
from submitit.core import utils as submitit_utils
from submitit.core.plugins import get_executors

from hydroslurm.core import rundir
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import UsageError
from hydroslurm.jobs.launch.rank import SUBMITIT_SIGNAL, InRank
from hydroslurm.runtime.autoload import PREEMPT_ENV

Cluster = Literal["slurm", "local", "debug"]


class WithoutSlurm:
    """submitit's own executor of this machine, chosen and set as its AutoExecutor does."""

    def __init__(self, folder: Path, cluster: str, **options: Any) -> None:
        """``options``: of submitit's LocalExecutor.

        Raises:
            UsageError: no such cluster.
        """
        if cluster not in ("local", "debug"):
            raise UsageError(f'cluster={cluster!r}: wanted "slurm", "local" or "debug"')
        prefixed = {f"local_{name}": value for name, value in options.items()}
        self._auto = submitit.AutoExecutor(folder, cluster=cluster, **prefixed)

    def update_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Set what submitit's AutoExecutor takes; what is Slurm's alone has no meaning here."""
        named = {
            name if self._is_auto(name) else f"slurm_{name}": value
            for name, value in parameters.items()
        }
        try:
            self._auto.update_parameters(**named)
        except (AssertionError, ValueError, NameError) as error:
            raise UsageError(str(error)) from error

    def submit(self, run: RunDir, delayed: submitit_utils.DelayedSubmission) -> submitit.Job[Any]:
        """Have submitit run one call, with its files in the run folder."""
        delayed.function = InRank(delayed.function, run.root)
        inner = copy(self._auto._executor)
        inner.folder = run.logs
        with submitit_utils.environment_variables(
            **{
                "SUBMITIT_PREEMPT_SIGNAL": SUBMITIT_SIGNAL,
                PREEMPT_ENV: os.environ.get(PREEMPT_ENV, "pause"),
                rundir.RUN_DIR_ENV: run.root,
            }
        ):
            (job,) = inner._internal_process_submissions([delayed])
        return job

    def _is_auto(self, name: str) -> bool:
        return name in self._auto._valid_parameters() or name.partition("_")[0] in get_executors()

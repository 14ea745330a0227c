"""submitit's handle of a job, for those that can be paused."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core.utils import JobPaths
from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

from hydroslurm.core.rundir import RunDir
from hydroslurm.jobs.launch.rank import SUBMITIT_SIGNAL


class _Watcher(SlurmInfoWatcher):
    """submitit's poll of sacct. submitit itself takes a suspended job for one that has ended.

    Each asks the Slurm that its jobs were submitted to, whatever ``SLURM_CONF`` says by then: job
    ids of two clusters are the same numbers.
    """

    def __init__(self, slurm_conf: str | None) -> None:
        super().__init__(delay_s=600)
        self._slurm_conf = slurm_conf

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        suspended = self.get_state(job_id, mode=mode).upper().startswith("SUSPENDED")
        return not suspended and super().is_done(job_id, mode="cache")

    def _make_command(self) -> list[str] | None:
        command: list[str] | None = super()._make_command()
        if command is None or self._slurm_conf is None:
            return command
        return ["env", f"SLURM_CONF={self._slurm_conf}", *command]


class PausableJob(SlurmJob[Any]):
    """submitit's job handle, which knows the run folder and waits through suspensions."""

    watcher = _Watcher(None)

    def __init__(
        self, folder: str | os.PathLike[str], job_id: str, tasks: Sequence[int] = (0,)
    ) -> None:
        """Of a job that was submitted, now or by another process: ``folder`` is that of its
        executor, or has submitit's files in it."""
        script = JobPaths(Path(folder), job_id).submission_file
        # the executor has left a link there, or in the folder's place
        logs = script.resolve().parent if script.exists() else Path(folder)
        super().__init__(logs, job_id, tasks)
        self.run_dir = RunDir(logs.parent / job_id.partition("_")[2])

    def _interrupt(self, timeout: bool = False) -> None:
        """As submitit's, by the signals that mean it here: SIGUSR2, which submitit sends, resumes a
        pause."""
        for name in (SUBMITIT_SIGNAL,) if timeout else ("TERM", SUBMITIT_SIGNAL):
            subprocess.check_call(["scancel", self.job_id, "--signal", name])

    def _register_in_watcher(self) -> None:
        """Called once, by submitit's constructor."""
        conf = os.environ.get("SLURM_CONF")
        if conf is not None:
            self.watcher = _WATCHERS.setdefault(conf, _Watcher(conf))
        super()._register_in_watcher()


_WATCHERS: dict[str, _Watcher] = {}
"""SLURM_CONF -> the watcher of that Slurm, shared by its jobs as submitit's is."""

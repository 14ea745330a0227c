"""One run of the script under test, and its attempts: local processes, or a job.

Each run has its own folder: ``work``, in which the script runs, and ``attempt1``, ``attempt2`` ...
with the recorder's files and the script's output.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydroslurm.core import rundir
from hydroslurm.core.files import clean, read_end, write_atomically
from hydroslurm.core.proc import environ_of, pids
from hydroslurm.errors import ProofError, UsageError
from hydroslurm.prove import updates
from hydroslurm.prove.updates import LIMIT_FILE, PROVE_ENV, RESTART, Update

if TYPE_CHECKING:
    from hydroslurm.slurm.client import Job, SlurmClient

_POLL_S = 0.01
_ASK_SLURM_S = 0.5
_KILL_S = 10.0
_COPIED_BYTES = 16 << 20
_TAIL_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Script:
    """The command to run, and how.

    Attributes:
        command: the program and its arguments.
        environ: of the script.
        links: files and folders below the current one that it reads by a relative path.
        grace_s: seconds between SIGTERM and SIGKILL; in a job, Slurm decides.
        limit_s: seconds for an attempt's next step, including a wait in the queue.
        sbatch: options for sbatch to run it as a job; None: as local processes.
    """

    command: tuple[str, ...]
    environ: Mapping[str, str]
    links: tuple[str, ...] = ()
    grace_s: float = 30.0
    limit_s: float = 300.0
    sbatch: tuple[str, ...] | None = None


def runnable(command: Sequence[str]) -> tuple[str, ...]:
    """Return the command for use in another folder; if its first word is a Python script, this
    interpreter runs it.

    Raises:
        UsageError: the script does not exist.
    """
    script = next((word for word in command if word.endswith(".py")), None)
    if script is not None and not Path(script).is_file():
        raise UsageError(f"there is no script {clean(script)!r}; wanted the path of a Python file")
    if Path(command[0]).suffix == ".py":
        command = (sys.executable, *command)
    return tuple(str(Path(word).absolute()) if _is_script(word) else word for word in command)


def _is_script(word: str) -> bool:
    return word.endswith(".py") and Path(word).is_file()


class ScriptRun(ABC):
    """A run of the script, attempt after attempt. As a context manager it leaves nothing running.

    Args:
        root: its folder, which this creates.
        attempts: maximum number; the first is attempt 1.
        limit: how many updates each may make until :meth:`allow`; None: any number.
    """

    was_killed = False
    """The current attempt ended by SIGKILL, at the end of the grace or before."""

    def __init__(self, script: Script, root: Path, *, attempts: int, limit: int | None) -> None:
        self.script = script
        self.root = root
        self.number = 0
        self.status: int | None = None
        self.first_step_s: float | None = None
        self._work = root / "work"
        _fill(self._work, script.links)
        for number in range(1, attempts + 1):
            folder = root / f"attempt{number}"
            folder.mkdir()
            _write_limit(folder, limit)

    def __enter__(self) -> ScriptRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def records(self) -> Path:
        """The current attempt's folder."""
        return self.root / f"attempt{self.number}"

    def begin(self) -> None:
        """Start the next attempt."""
        self.number += 1
        self.status, self.was_killed = None, False
        self._counter = updates.Counter(self.records)
        self._start()

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def is_running(self) -> bool:
        """Whether the attempt runs or waits to start; sets ``status`` once it does not."""

    @abstractmethod
    def stop(self) -> int | None:
        """Stop the attempt as a preemption does, with no limit on updates until it leaves; return
        its exit status if known."""

    @abstractmethod
    def end(self) -> None:
        """End the run: leave nothing running."""

    @abstractmethod
    def _output(self) -> Path: ...

    def allow(self, limit: int | None) -> None:
        """Limit the updates of this attempt; None: any number."""
        _write_limit(self.records, limit)

    def read(self) -> dict[int, list[Update]]:
        """Return rank -> the updates of this attempt."""
        return updates.read(self.records)

    def count(self) -> int:
        """Return how many updates all ranks have made in this attempt."""
        return self._counter.count()

    def wait_for(self, wanted: int) -> int:
        """Wait for ``wanted`` updates or the end of the attempt; return their number.

        Raises:
            ProofError: none came for too long.
        """
        count, moved_s = self.count(), time.monotonic()
        while True:
            running = self.is_running()
            now = self.count()
            if now != count:
                count, moved_s = now, time.monotonic()
                self.first_step_s = self.first_step_s or moved_s
            if count >= wanted or not running:
                return count
            if time.monotonic() - moved_s > self.script.limit_s:
                raise ProofError(
                    f"attempt {self.number} has made no step for {self.script.limit_s:g} s, and "
                    f"{count} before. Does it hang, or take longer (--limit)? {self.last_words()}"
                )
            time.sleep(_POLL_S)

    def last_words(self) -> str:
        """Return the end of its output, for a message."""
        try:
            text = read_end(self._output(), most_bytes=_TAIL_BYTES).decode(errors="replace")
        except OSError:
            text = ""
        lines = [f"  {clean(line)}" for line in text.splitlines()[-12:]]
        return "\n".join(["Its last words:", *(lines or ["  (it printed nothing)"])])

    def _environ(self, records: str) -> dict[str, str]:
        """Return additions to the script's environment."""
        path = [str(Path.cwd()), *filter(None, [self.script.environ.get("PYTHONPATH")])]
        return {
            PROVE_ENV: records,
            "HYDROSLURM_PREEMPT": self.script.environ.get("HYDROSLURM_PREEMPT", ""),
            rundir.RUN_DIR_ENV: str(self.root / "run"),
            "PYTHONPATH": os.pathsep.join(path),
        }


class LocalRun(ScriptRun):
    """Processes of this machine, signalled as Slurm signals all those of a job step.

    They are found by a variable that they inherit, even if they left its session, as torchrun's
    workers do.
    """

    _process: subprocess.Popen[bytes] | None = None

    def _start(self) -> None:
        with self._output().open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    self.script.command,
                    cwd=self._work,
                    env={**self.script.environ, **self._environ(str(self.records))},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise UsageError(
                    f"{clean(self.script.command[0])} cannot be run: {error.strerror}"
                ) from error

    def _output(self) -> Path:
        return self.root / f"attempt{self.number}.log"

    def is_running(self) -> bool:
        assert self._process is not None
        self.status = self._process.poll()
        return self.status is None

    def stop(self) -> int | None:
        assert self._process is not None
        self._signal(signal.SIGTERM)
        self.allow(None)
        try:
            self._process.wait(self.script.grace_s)
        except subprocess.TimeoutExpired:
            self.was_killed = True
        self.end()
        status = self._process.wait()
        self.was_killed = self.was_killed or status in (-signal.SIGKILL, 128 + signal.SIGKILL)
        return status

    def end(self) -> None:
        if self._process is None:
            return
        deadline_s = time.monotonic() + _KILL_S
        while self._signal(signal.SIGKILL) and time.monotonic() < deadline_s:
            self._process.poll()
            time.sleep(_POLL_S)
        self._process.wait()

    def _signal(self, signo: int) -> int:
        """Send a signal; return how many processes got it."""
        processes = _processes_of(self.records)
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signo)
        return len(processes)


class JobRun(ScriptRun):
    """One batch job, submitted here, and requeued by ``scontrol requeue`` for each stop."""

    def __init__(self, script: Script, root: Path, *, attempts: int, limit: int | None) -> None:
        super().__init__(script, root, attempts=attempts, limit=limit)
        self._client, self._job = self._submitted()

    def _submitted(self) -> tuple[SlurmClient, Job]:
        from hydroslurm.core.jobid import JobId
        from hydroslurm.slurm.client import open_client
        from hydroslurm.slurm.programs import sbatch, submitted

        script = self.root / "job.sh"
        options = ["--job-name=hydroslurm-prove", *(self.script.sbatch or ())]
        ours = ["--requeue", "--open-mode=append", "-o", str(self._output())]
        variables = self._environ(f"{self.root}/attempt{RESTART}")
        exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        script.write_text(
            "\n".join(
                [
                    "#!/bin/sh",
                    *exports,
                    f"cd {shlex.quote(str(self._work))} || exit 1",
                    f"exec srun {shlex.join(self.script.command)}",
                    "",
                ]
            )
        )
        done = sbatch(script, *options, *ours)
        job_id = submitted(done.stdout)
        if job_id is None:
            raise UsageError(f"sbatch refused the job: {clean(' '.join(done.stderr.split()))}")
        client = open_client()
        jobs = client.jobs_of(JobId(job_id))
        if jobs[0].array_job_id is not None:
            for job in jobs:
                client.cancel(job)
            raise UsageError("--slurm: a job array cannot be proved; omit --array")
        return client, jobs[0]

    def _start(self) -> None:
        """Do nothing: Slurm starts it, also after a stop."""
        self._runs, self._asked_s = True, 0.0

    def _output(self) -> Path:
        return self.root / "job.log"

    def is_running(self) -> bool:
        if self._runs and time.monotonic() - self._asked_s >= _ASK_SLURM_S:
            job = self._client.job(self._job.job_id)
            self._asked_s = time.monotonic()
            if job.restart_count >= self.number:
                raise ProofError(
                    f"job {job.id} was requeued by Slurm or by somebody else, and only "
                    "hydroslurm prove is to stop it; use a partition and QOS that are not preempted"
                )
            self._runs = not job.state.has_ended
            if not self._runs:
                self.status = 0 if job.state.value == "COMPLETED" else job.exit_code or 1
        return self._runs

    def stop(self) -> int | None:
        self._client.requeue(self._job)
        self._wait_until(self._is_requeued)
        return None

    def _is_requeued(self, job: Job) -> bool:
        self.allow(self.count() + 1)  # the signal may arrive at any time: step by step
        return job.restart_count >= self.number and _has_left(job)

    def end(self) -> None:
        job = self._client.job(self._job.job_id)
        if not job.state.has_ended:
            self._client.cancel(job)
        self._wait_until(_has_left)

    def _wait_until(self, is_so: Callable[[Job], bool]) -> None:
        """Wait for Slurm's state, which counts a restart or an end while processes still write."""
        give_up_s = time.monotonic() + self.script.limit_s
        while not is_so(job := self._client.job(self._job.job_id)):
            if time.monotonic() > give_up_s:
                raise ProofError(
                    f"job {job.id} was to be stopped, and is still {job.state.value} after "
                    f"{self.script.limit_s:g} s (--limit)"
                )
            time.sleep(_ASK_SLURM_S)


def _has_left(job: Job) -> bool:
    return "COMPLETING" not in job.flags


def new_run(script: Script, root: Path, *, attempts: int, limit: int | None) -> ScriptRun:
    """Create a local run of the script, or a job if there are options for sbatch."""
    kind = LocalRun if script.sbatch is None else JobRun
    return kind(script, root, attempts=attempts, limit=limit)


def _fill(work: Path, links: Sequence[str]) -> None:
    """Fill a folder with copies of the current one's files, and the links."""
    work.mkdir(parents=True)
    here = Path.cwd()
    for path in here.iterdir():
        if path.is_file() and path.stat().st_size <= _COPIED_BYTES:
            shutil.copy2(path, work / path.name)
    for name in links:
        source, target = here / name, work / name
        if Path(name).is_absolute() or ".." in Path(name).parts or not source.exists():
            raise UsageError(
                f"--link {clean(name)}: wanted the name of a file or folder below {here}"
            )
        if not os.path.lexists(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)


def _write_limit(folder: Path, limit: int | None) -> None:
    text = "" if limit is None else str(limit)
    write_atomically(folder / LIMIT_FILE, text.encode())


def _processes_of(records: Path) -> list[int]:
    """Return our own processes that were started to write there."""
    processes = []
    for pid in pids():
        with contextlib.suppress(OSError):  # it just ended, or is another user's
            if environ_of(pid).get(PROVE_ENV) == str(records):
                processes.append(pid)
    return processes

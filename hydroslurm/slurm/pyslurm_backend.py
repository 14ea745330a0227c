"""The client over pyslurm, for release 25.11 and later.

Only ``open_client`` imports this module, and only this module imports pyslurm, when a client is
made: without a slurm.conf, or with one that it cannot read, ``import pyslurm`` ends the process.

What was read in the source of pyslurm 25.11.2 and is met here:

- Its calls hold the GIL until libslurm has an answer or gives up (MessageTimeout, once or twice),
  so
  ``Patience.call_timeout_s`` does not bound them; the retries are ours.
- ``cancel`` and ``send_signal`` pass over "already done", and cancel over an unknown id too; the
  job is looked
  up first, so that both backends raise alike.
- ``Job.time_limit`` is in minutes and None for unlimited; ``Partition.max_time`` likewise.
- ``Job.exit_code`` has lost 128 when it was 128 or more, as ``values.Job`` says for all backends.
- ``suspend`` and ``unsuspend`` of an unknown job fail with whatever errno is left over from before,
  "Zero Bytes were transmitted or received" for one; the job is looked up first.
- libslurm reads slurm.conf when pyslurm is imported and keeps it, whatever SLURM_CONF becomes:
  ``open_client`` lets no client for another one be made.
- ``Config.preempt_parameters`` and ``auth_info`` are taken apart already, into a dict and a list.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from hydroslurm.errors import (
    ControllerUnreachable,
    UnreadableOutput,
    UsageError,
    WrongJobState,
)
from hydroslurm.slurm import refusals
from hydroslurm.slurm.commands import (
    CommandClient,
    check_signallable,
    checked_job_id,
    signal_number,
)
from hydroslurm.slurm.config import Config
from hydroslurm.slurm.pyslurm_values import config_of_pyslurm, job_of_pyslurm, partition_of_pyslurm
from hydroslurm.slurm.retry import Patience
from hydroslurm.slurm.values import Job, Partition, Qos

Result = TypeVar("Result")


class PyslurmClient:
    """As :class:`hydroslurm.slurm.client.SlurmClient` says."""

    backend = "pyslurm"

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        patience: Patience | None = None,
        why: str = "pyslurm: asked for by the caller",
        module: Any = None,
    ) -> None:
        """Import pyslurm.

        Args:
            environ: for ``history``, which asks sacct.
            module: stands in for pyslurm; None imports it.
        """
        if module is None:
            import pyslurm

            module = pyslurm
        self.why = why
        self._pyslurm = module
        self._patience = patience or Patience()
        self._commands = CommandClient(environ, patience=self._patience)

    def job(self, job_id: int) -> Job:
        checked_job_id(job_id)
        return self._ask(
            f"load job {job_id}", lambda: job_of_pyslurm(self._pyslurm.Job.load(job_id))
        )

    def jobs(
        self, *, user: str | None = None, ids: Collection[int] | None = None
    ) -> tuple[Job, ...]:
        if ids is not None and not ids:
            return ()
        wanted = None if ids is None else frozenset(checked_job_id(i) for i in ids)
        known = self._ask(
            "load jobs",
            lambda: [job_of_pyslurm(each) for each in self._pyslurm.Jobs.load().values()],
        )
        return tuple(
            job
            for job in known
            if (user is None or job.user == user)
            and (wanted is None or job.job_id in wanted or job.array_job_id in wanted)
        )

    def history(self, job_id: int) -> tuple[Job, ...]:
        # pyslurm.db tells the last life of a job only; sacct -D tells all
        return self._commands.history(job_id)

    def submit_line(self, job_id: int) -> str:
        return self._commands.submit_line(job_id)

    def partitions(self) -> tuple[Partition, ...]:
        return self._ask(
            "load partitions",
            lambda: tuple(
                partition_of_pyslurm(p) for p in self._pyslurm.Partitions.load().values()
            ),
        )

    def qoses(self) -> tuple[Qos, ...] | None:
        # pyslurm.db would hold a connection to slurmdbd open; this is asked once in a job's life
        return self._commands.qoses()

    def batch_script(self, job_id: int) -> str | None:
        return self._commands.batch_script(job_id)

    def config(self) -> Config:
        return self._ask(
            "load configuration",
            lambda: config_of_pyslurm(self._pyslurm.slurmctld.Config.load()),
        )

    def suspend(self, job_id: int) -> None:
        self.job(job_id)  # raises NoSuchJob
        self._act(job_id, "suspend", lambda job: job.suspend())

    def resume(self, job_id: int) -> None:
        self.job(job_id)  # raises NoSuchJob
        self._act(job_id, "resume", lambda job: job.unsuspend())

    def requeue(self, job_id: int) -> None:
        try:
            self._act(job_id, "requeue", lambda job: job.requeue())
        except WrongJobState as error:
            if refusals.ALREADY_PENDING not in str(error):
                raise

    def requeue_hold(self, job_id: int) -> None:
        try:
            self._act(job_id, "requeue and hold", lambda job: job.requeue(hold=True))
        except WrongJobState as error:
            if refusals.ALREADY_PENDING not in str(error):
                raise
            self.hold(job_id)

    def signal(
        self,
        job_id: int,
        signal: str | int | signals.Signals,
        *,
        step: int | None = None,
        batch: bool = False,
        full: bool = False,
    ) -> None:
        number = signal_number(signal)
        if (step is not None) + batch + full > 1:
            raise UsageError("only one of step=, batch= and full= can be asked for")
        if step is not None:
            # pyslurm.JobStep.send_signal exists, but needs the step to be loaded first; scancel
            # takes "12.0"
            self._commands.signal(job_id, number, step=step)
            return
        check_signallable(self.job(job_id), number)
        steps = "batch" if batch else "all" if full else "children"
        self._act(
            job_id,
            f"signal {number}",
            lambda job: job.send_signal(number, steps=steps),
            may_repeat=refusals.never_arrived,
        )

    def cancel(self, job_id: int) -> None:
        if not self.job(job_id).state.has_ended:
            self._act(job_id, "cancel", lambda job: job.cancel())

    def hold(self, job_id: int) -> None:
        self._act(job_id, "hold", lambda job: job.hold())

    def release(self, job_id: int) -> None:
        self._act(job_id, "release", lambda job: job.release())

    def set_requeue(self, job_id: int, *, allowed: bool) -> None:
        self._commands.set_requeue(job_id, allowed=allowed)

    def node_address(self, name: str) -> str:
        return self._commands.node_address(name)

    def _act(
        self,
        job_id: int,
        verb: str,
        call: Callable[[Any], None],
        *,
        may_repeat: Callable[[ControllerUnreachable], bool] = lambda _: True,
    ) -> None:
        checked_job_id(job_id)
        self._ask(
            f"{verb} job {job_id}", lambda: call(self._pyslurm.Job(job_id)), may_repeat=may_repeat
        )

    def _ask(
        self,
        doing: str,
        call: Callable[[], Result],
        *,
        may_repeat: Callable[[ControllerUnreachable], bool] = lambda _: True,
    ) -> Result:
        def once() -> Result:
            try:
                return call()
            except self._pyslurm.RPCError as error:
                raise refusals.refusal(str(error), doing=f"pyslurm: {doing}") from error
            except (AttributeError, TypeError) as error:
                raise UnreadableOutput(
                    f"pyslurm: {doing}: {error}. This backend knows pyslurm 25.11; "
                    "HYDROSLURM_SLURM_BACKEND=commands does without it"
                ) from error

        return self._patience.retry(once, may_repeat=may_repeat)

"""The settings that decide what this site does to its jobs: asked once, used for any of them."""

from __future__ import annotations

from dataclasses import replace

from hydroslurm.errors import SlurmError, UsageError
from hydroslurm.slurm.client import Config, SlurmClient
from hydroslurm.slurm.policy import SitePolicy, find_partition, kill_after_s, site_policy
from hydroslurm.slurm.values import Job, Partition, Qos


class Policies:
    """The site's settings at the moment they were read."""

    def __init__(
        self, config: Config, partitions: tuple[Partition, ...], qoses: tuple[Qos, ...] | None
    ) -> None:
        self._config = config
        self._partitions = partitions
        self._qoses = qoses
        self._known: dict[tuple[object, ...], SitePolicy | None] = {}

    @classmethod
    def read(cls, client: SlurmClient) -> Policies:
        """Two requests to slurmctld, and one to slurmdbd where QOS decide.

        Raises:
            SlurmError: Slurm could not be asked.
        """
        config = client.config()
        qoses = client.qoses() if config.preempt_type == "preempt/qos" else None
        return cls(config, client.partitions(), qoses)

    @property
    def kill_after_s(self) -> float:
        """As :attr:`SitePolicy.kill_after_s`, which is the same for all jobs."""
        return kill_after_s(self._config.kill_wait_s)

    def of(self, job: Job) -> SitePolicy | None:
        """None for a job of a partition that is new since then."""
        kind = (job.partition, job.qos, job.is_batch, job.may_requeue)
        if kind not in self._known:
            self._known[kind] = self._policy(job)
        return self._known[kind]

    def _policy(self, job: Job) -> SitePolicy | None:
        try:
            return site_policy(
                self._config,
                find_partition(self._partitions, job.partition),
                partitions=self._partitions,
                qoses=self._qoses,
                job=replace(job, comment=""),
            )
        except UsageError:
            return None


def read_policies(client: SlurmClient) -> Policies | None:
    """As :meth:`Policies.read`; None where Slurm could not be asked."""
    try:
        return Policies.read(client)
    except SlurmError:
        return None

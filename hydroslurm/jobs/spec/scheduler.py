"""Where in Slurm a job goes, and for how long."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, WithJsonSchema

from hydroslurm.jobs.spec.part import Count, Part, unit
from hydroslurm.jobs.spec.text import OptionName, SlurmWord, is_text, slurm_word

RESERVED = frozenset({
    "job-name", "comment", "output", "error", "input", "nodes", "ntasks", "ntasks-per-node",
    "cpus-per-task", "mem", "gpus-per-node", "gres", "partition", "qos", "account", "reservation",
    "nice", "time", "signal", "requeue", "no-requeue", "open-mode", "array", "wrap", "chdir",
    "export", "export-file", "priority", "dependency", "wait", "parsable", "test-only", "uid",
    "gid", "help", "usage", "version",
})  # fmt: skip
"""sbatch's options that ``scheduler.options`` cannot hold."""


def _not_ours(name: str) -> str:
    bare = name.replace("_", "-")
    # sbatch takes any unambiguous beginning of an option for the option
    if any(one.startswith(bare) for one in RESERVED):
        raise ValueError(f"{name!r} is set by hydroslurm, or has a field of its own")
    return name


def _sbatch_value(value: object) -> object:
    if value is True:
        return value
    if value is False:
        raise ValueError("false is no value of an option; leave the option out")
    if isinstance(value, (list, dict)):
        raise ValueError("wanted one word, or true for an option without a value")
    return slurm_word(str(is_text(value)))


Nice = Annotated[int, Field(ge=0, le=2147483645)]
"""What a user may take off a job's priority."""
FreeOption = Annotated[OptionName, AfterValidator(_not_ours)]
"""An option of sbatch that hydroslurm leaves to the user."""
SbatchValue = Annotated[
    Any,
    AfterValidator(_sbatch_value),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"const": True}]}),
]
"""A word for an option of sbatch; true for one that takes none."""


class Scheduler(Part):
    """Where in Slurm the job goes."""

    partition: SlurmWord | None = Field(
        default=None,
        description="Partition, or several with commas; what other systems call a queue. Default: "
        "the site's.",
    )
    qos: SlurmWord | None = Field(
        default=None,
        description="Quality of service: what gives a job a higher priority, or makes it "
        "preemptible, where the site has such. Default: the account's.",
    )
    account: SlurmWord | None = Field(
        default=None, description="Account to charge. Default: the user's."
    )
    reservation: SlurmWord | None = Field(
        default=None, description="Reservation to run in. Default: none."
    )
    nice: Nice = Field(
        default=0,
        description="Taken off the job's priority, so that others go first. There is no field that "
        "raises it: Slurm lets only operators set a priority or a nice below 0. Default: 0.",
        json_schema_extra=unit("points of priority"),
    )
    time_limit_minutes: Count | None = Field(
        default=None,
        description="Limit of one life of the job. One that saves when it is warned "
        "(preemption.warningSeconds) is requeued and goes on. Default: the partition's.",
        json_schema_extra=unit("minutes"),
    )
    options: dict[FreeOption, SbatchValue] = Field(
        default_factory=dict,
        description="More options of sbatch by their long names, such as "
        "{constraint: a100, exclusive: true}. Those that hydroslurm sets are refused. Default: {}.",
    )

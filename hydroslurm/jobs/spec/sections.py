"""When a job is given up, and what happens when somebody else wants its nodes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from hydroslurm.jobs.spec.fields import (
    Command,
    Count,
    Line,
    OptionName,
    Part,
    SlurmWord,
    Text,
    Whole,
    as_tuple,
    is_text,
    slurm_word,
    unit,
)

CleanPolicy = Literal["None", "All", "Unfinished"]
PreemptionMode = Literal["pause", "requeue", "both"]


class RunPolicy(Part):
    """When the job is given up, and what is left then."""

    backoff_limit: Whole = Field(
        default=3,
        description="How often the job is started again by its restartPolicy, for all replicas "
        "together; once more, and it has failed. Preemptions do not count. Default: 3.",
        json_schema_extra=unit("restarts"),
    )
    preemption_limit: Whole | None = Field(
        default=None,
        description="How often the job may be preempted or requeued; once more, and it has failed. "
        "Default: unlimited.",
        json_schema_extra=unit("preemptions"),
    )
    active_deadline_seconds: Count | None = Field(
        default=None,
        description="How long the job may hold its nodes, over all its attempts, without the time "
        "that it was suspended. Default: unlimited.",
        json_schema_extra=unit("seconds"),
    )
    clean_policy: CleanPolicy = Field(
        default="Unfinished",
        description="What is done once the job has succeeded or failed. Unfinished: replicas that "
        "still run are ended. All: and their scratch folders are removed. None: they go on to "
        "their own end, and nothing is removed. Default: Unfinished.",
    )


class Preemption(Part):
    """What happens when somebody else wants the nodes."""

    mode: PreemptionMode = Field(
        default="both",
        description="pause: park in place when suspended, and go on in place. requeue: save, "
        "leave, be requeued and go on. both: whichever Slurm asks for. Default: both.",
    )
    warning_seconds: Annotated[int, Field(ge=1, le=65535)] = Field(
        default=120,
        description="How long before the time limit the ranks are told to save; Slurm may be 60 s "
        "early. Default: 120.",
        json_schema_extra=unit("seconds"),
    )
    checkpoint_directory: Text | None = Field(
        default=None,
        description="Where a hydroslurm.Run of the script saves; a relative one begins at the "
        "folder of the spec. Default: checkpoints in the run folder.",
    )
    save_every_seconds: Whole | None = Field(
        default=None,
        description="How long such a Run trains between two saves; 0: it saves only when it is "
        "stopped. Default: what the script says, else 600.",
        json_schema_extra=unit("seconds"),
    )
    attempts_without_progress: Count | None = Field(
        default=None,
        description="The job is ended after so many attempts in a row of such a Run that begin at "
        "the same step. Default: what the script says, else 5.",
        json_schema_extra=unit("attempts"),
    )


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
        description="Limit of each attempt of the job. One that saves when it is warned "
        "(preemption.warningSeconds) is requeued and goes on. Default: the partition's.",
        json_schema_extra=unit("minutes"),
    )
    options: dict[FreeOption, SbatchValue] = Field(
        default_factory=dict,
        description="More options of sbatch by their long names, such as "
        "{constraint: a100, exclusive: true}. Those that hydroslurm sets are refused. Default: {}.",
    )


class DebugReplica(Part):
    """What replicas of one type do instead of training."""

    type: Line = Field(default="worker", description="Which replicas. Default: worker.")
    command: Command = Field(
        default=("sleep", "infinity"),
        description="Run in the place of the command. Default: [sleep, infinity].",
    )
    skip_init: bool = Field(
        default=False, description="Do not run the init steps either. Default: false."
    )


class Debug(Part):
    """Everything is up, the training is not started: `hydroslurm attach` gives a shell there."""

    enable: bool = Field(default=False, description="Do not start the training. Default: false.")
    replica_specs: Annotated[tuple[DebugReplica, ...], BeforeValidator(as_tuple)] = Field(
        default=(),
        description="What replicas do instead; those of a type that is not listed sleep. "
        "Default: [].",
    )


class RunMode(Part):
    """How the job is run."""

    debug: Debug = Field(
        default_factory=Debug,
        description="Everything is up, the training is not started, and `hydroslurm attach` gives "
        "a shell there. Default: off.",
    )


class TensorBoard(Part):
    """A TensorBoard that is there as long as the job runs; `hydroslurm describe` says where."""

    log_directory: Text = Field(
        default="runs",
        description="What it shows; a relative one begins at the folder of the spec. "
        "Default: runs.",
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        default=0,
        description="TCP port; 0 takes any free one. Default: 0.",
        json_schema_extra=unit("port"),
    )
    host: Line = Field(
        default="127.0.0.1",
        description="Address that it binds. The default is reached through ssh only, for "
        "TensorBoard asks nobody for a password. Default: 127.0.0.1.",
    )

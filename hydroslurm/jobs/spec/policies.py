"""When a job is given up, and what happens when somebody else wants its nodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hydroslurm.jobs.spec.part import Count, Part, Whole, unit
from hydroslurm.jobs.spec.text import Text

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
        description="How long the job may hold its nodes, all its lives together, without the time "
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
        description="So many lives in a row of such a Run that begin at the same step end the job. "
        "Default: what the script says, else 5.",
        json_schema_extra=unit("lives"),
    )

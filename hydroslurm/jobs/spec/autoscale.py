"""The section ``elastic.autoscale`` of a job spec: the run chooses its size by rules."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from hydroslurm.jobs.spec.fields import Count, Part, Printable, SlurmWord, Whole, as_tuple, unit

Fraction = Annotated[float, Field(gt=0, le=1, strict=False)]
Positive = Annotated[float, Field(gt=0, le=1e9, strict=False)]


class ScaleBehavior(Part):
    """How far and how often the size moves in one direction."""

    stabilization_window_seconds: Whole | None = Field(
        default=None,
        description="The most cautious recommendation of so long counts, so that what flaps moves "
        "nothing. Default: 60 up, 300 down.",
        json_schema_extra=unit("seconds"),
    )
    cooldown_seconds: Whole | None = Field(
        default=None,
        description="So long after a change of the size nothing moves this way. Default: 180.",
        json_schema_extra=unit("seconds"),
    )
    step: Count | None = Field(
        default=None,
        description="At most so many members at once. Default: 4.",
        json_schema_extra=unit("members"),
    )

    def rules(self) -> dict[str, Any]:
        """What was given, by the names of the policy."""
        given = {
            "stabilization_window_s": self.stabilization_window_seconds,
            "cooldown_s": self.cooldown_seconds,
            "step": self.step,
        }
        return {name: value for name, value in given.items() if value is not None}


class ScaleSchedule(Part):
    """Narrower bounds at certain hours; they hold at once."""

    days: Annotated[
        tuple[Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"], ...],
        BeforeValidator(as_tuple),
    ] = Field(
        default=("mon", "tue", "wed", "thu", "fri", "sat", "sun"),
        description="Days on which it begins. Default: [mon, tue, wed, thu, fri, sat, sun].",
    )
    start: Printable = Field(
        default="00:00", description='From, as "HH:MM" with quotes. Default: "00:00".'
    )
    end: Printable = Field(
        default="00:00",
        description='Until; at or before start it is on the next day. Default: "00:00".',
    )
    time_zone: Printable = Field(
        default="UTC", description="Of start and end, as Europe/Berlin. Default: UTC."
    )
    min: Count | None = Field(
        default=None,
        description="Fewest members. Default: elastic.min.",
        json_schema_extra=unit("members"),
    )
    max: Count | None = Field(
        default=None,
        description="Most members. Default: elastic.max.",
        json_schema_extra=unit("members"),
    )


class Autoscale(Part):
    """Rules by which the run chooses how many members it wants, between ``min`` and ``max``."""

    dry_run: bool = Field(
        default=False,
        description="Decide, and only record what would have been done. Default: false.",
    )
    partition: SlurmWord | None = Field(
        default=None,
        description="Whose queue and idle nodes count. Default: scheduler's.",
    )
    step_time_seconds: Positive | None = Field(
        default=None,
        description="Target of the time of a step. Default: none.",
        json_schema_extra=unit("seconds"),
    )
    cpu: Fraction | None = Field(
        default=None,
        description="Target of the use of the nodes' CPUs, 0 to 1. Default: none.",
        json_schema_extra=unit("part of 1"),
    )
    memory: Fraction | None = Field(
        default=None,
        description="Target of the use of the nodes' memory, 0 to 1. Default: none.",
        json_schema_extra=unit("part of 1"),
    )
    gpu: Fraction | None = Field(
        default=None,
        description="Target of the use of the GPUs, 0 to 1. Default: none.",
        json_schema_extra=unit("part of 1"),
    )
    efficiency: Fraction | None = Field(
        default=None,
        description="Least samples per second that the last member has to bring, as a part of what "
        "one brings at the smallest size seen. Default: none.",
        json_schema_extra=unit("part of 1"),
    )
    leave_idle: Whole | None = Field(
        default=None,
        description="Grow only into idle nodes of the partition, and leave so many. "
        "Default: idle nodes do not count.",
        json_schema_extra=unit("nodes"),
    )
    queue_length: Whole | None = Field(
        default=None,
        description="Give nodes back while more jobs of others wait in the partition. "
        "Default: the queue does not count.",
        json_schema_extra=unit("jobs"),
    )
    node_price_per_hour: Positive | None = Field(
        default=None,
        description="Of one node, in any currency. Default: none.",
        json_schema_extra=unit("per hour"),
    )
    max_price_per_hour: Positive | None = Field(
        default=None,
        description="Ceiling of the whole run. Default: none.",
        json_schema_extra=unit("per hour"),
    )
    tolerance: Annotated[float, Field(ge=0, le=1, strict=False)] = Field(
        default=0.1,
        description="A target that is missed by less than this part of it is met. Default: 0.1.",
        json_schema_extra=unit("part of 1"),
    )
    history_seconds: Count = Field(
        default=3600,
        description="Older observations are forgotten, and a size that did not pay is tried again. "
        "Default: 3600.",
        json_schema_extra=unit("seconds"),
    )
    schedule: Annotated[tuple[ScaleSchedule, ...], BeforeValidator(as_tuple)] = Field(
        default=(), description="Narrower bounds at certain hours. Default: []."
    )
    scale_up: ScaleBehavior = Field(
        default_factory=ScaleBehavior, description="How it grows. Default: see its fields."
    )
    scale_down: ScaleBehavior = Field(
        default_factory=ScaleBehavior, description="How it shrinks. Default: see its fields."
    )

    def rules(self, *, partition: str = "") -> dict[str, Any]:
        """As ``AutoscalePolicy.from_json`` reads them; ``partition``: the scheduler's."""
        given = self.model_dump(exclude_none=True)
        given["partition"] = self.partition or partition
        given["history_s"] = float(given.pop("history_seconds"))
        if self.step_time_seconds is not None:
            given["step_time_s"] = given.pop("step_time_seconds")
        given |= {"scale_up": self.scale_up.rules(), "scale_down": self.scale_down.rules()}
        return given

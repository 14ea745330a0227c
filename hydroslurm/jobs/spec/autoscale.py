"""The section ``elastic.autoscale`` of a job spec: the run chooses its size by rules."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hydroslurm.elastic.autoscale import SCALE_DOWN, SCALE_UP
from hydroslurm.jobs.spec.fields import Count, Part, SlurmWord, Whole, unit

Fraction = Annotated[float, Field(gt=0, le=1, strict=False)]
Positive = Annotated[float, Field(gt=0, le=1e9, strict=False)]


class ScaleUp(Part):
    """How far and how often the size grows."""

    stabilization_window_s: Whole = Field(
        default=SCALE_UP.stabilization_window_s,
        alias="stabilizationWindowSeconds",
        description="The most cautious recommendation of so long counts, so that what flaps moves "
        "nothing. Default: 60.",
        json_schema_extra=unit("seconds"),
    )
    cooldown_s: Whole = Field(
        default=SCALE_UP.cooldown_s,
        alias="cooldownSeconds",
        description="So long after a change of the size nothing moves this way. Default: 180.",
        json_schema_extra=unit("seconds"),
    )
    step: Count = Field(
        default=SCALE_UP.step,
        description="At most so many members at once. Default: 4.",
        json_schema_extra=unit("members"),
    )


class ScaleDown(ScaleUp):
    """How far and how often the size shrinks."""

    stabilization_window_s: Whole = Field(
        default=SCALE_DOWN.stabilization_window_s,
        alias="stabilizationWindowSeconds",
        description="The most cautious recommendation of so long counts, so that what flaps moves "
        "nothing. Default: 300.",
        json_schema_extra=unit("seconds"),
    )


class Autoscale(Part):
    """Rules by which the run chooses how many members it wants, between ``min`` and ``max``."""

    dry_run: bool = Field(
        default=False,
        description="Decide, and only record what would have been done. Default: false.",
    )
    partition: SlurmWord | None = Field(
        default=None,
        description="Whose queue counts. Default: scheduler's.",
    )
    step_time_s: Positive | None = Field(
        default=None,
        alias="stepTimeSeconds",
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
        description="Target of the use of the nodes' memory, without page "
        "cache, 0 to 1. Default: none.",
        json_schema_extra=unit("part of 1"),
    )
    gpu: Fraction | None = Field(
        default=None,
        description="Target of the use of the GPUs, 0 to 1. Default: none.",
        json_schema_extra=unit("part of 1"),
    )
    queue_length: Whole | None = Field(
        default=None,
        description="Give nodes back while more jobs of others wait in the partition. "
        "Default: the queue does not count.",
        json_schema_extra=unit("jobs"),
    )
    tolerance: Annotated[float, Field(ge=0, le=1, strict=False)] = Field(
        default=0.1,
        description="A target that is missed by less than this part of it is met. Default: 0.1.",
        json_schema_extra=unit("part of 1"),
    )
    scale_up: ScaleUp = Field(
        default_factory=ScaleUp, description="How it grows. Default: see its fields."
    )
    scale_down: ScaleDown = Field(
        default_factory=ScaleDown, description="How it shrinks. Default: see its fields."
    )

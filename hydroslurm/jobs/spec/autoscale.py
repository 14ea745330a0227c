"""The section ``elastic.autoscale`` of a job spec: the run chooses its size by rules."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hydroslurm.elastic.autoscale import SCALE_DOWN, SCALE_UP
from hydroslurm.jobs.spec.fields import Count, Part, SlurmWord, Whole

Fraction = Annotated[float, Field(gt=0, le=1, strict=False)]
Positive = Annotated[float, Field(gt=0, le=1e9, strict=False)]


class ScaleUp(Part):
    """How far and how often the size grows."""

    stabilization_window_s: Whole = SCALE_UP.stabilization_window_s
    """The most cautious recommendation of so long counts, so that what flaps moves nothing.
    [seconds] Default: 60."""
    cooldown_s: Whole = SCALE_UP.cooldown_s
    """So long after a change of the size nothing moves this way. [seconds] Default: 180."""
    step: Count = SCALE_UP.step
    """At most so many members at once. [members] Default: 4."""


class ScaleDown(ScaleUp):
    """How far and how often the size shrinks."""

    stabilization_window_s: Whole = SCALE_DOWN.stabilization_window_s
    """The most cautious recommendation of so long counts, so that what flaps moves nothing.
    [seconds] Default: 300."""


class Autoscale(Part):
    """Rules by which the run chooses how many members it wants, between ``min`` and ``max``."""

    dry_run: bool = False
    """Decide, and only record what would have been done. Default: false."""
    partition: SlurmWord | None = None
    """Whose queue counts. Default: scheduler's."""
    step_time_s: Positive | None = None
    """Target of the time of a step. [seconds] Default: none."""
    cpu: Fraction | None = None
    """Target of the use of the nodes' CPUs, 0 to 1. [part of 1] Default: none."""
    memory: Fraction | None = None
    """Target of the use of the nodes' memory, without page cache, 0 to 1. [part of 1] Default:
    none."""
    gpu: Fraction | None = None
    """Target of the use of the GPUs, 0 to 1. [part of 1] Default: none."""
    queue_length: Whole | None = None
    """Give nodes back while more jobs of others wait in the partition. [jobs] Default: the queue
    does not count."""
    tolerance: Annotated[float, Field(ge=0, le=1, strict=False)] = 0.1
    """A target that is missed by less than this part of it is met. [part of 1] Default: 0.1."""
    scale_up: ScaleUp = Field(default_factory=ScaleUp)
    """How it grows. Default: see its fields."""
    scale_down: ScaleDown = Field(default_factory=ScaleDown)
    """How it shrinks. Default: see its fields."""

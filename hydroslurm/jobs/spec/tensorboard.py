"""A TensorBoard beside the job."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hydroslurm.jobs.spec.part import Part, unit
from hydroslurm.jobs.spec.text import Line, Text


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

"""What a script or a function asks Slurm for: by options, and checked as the fields of a spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hydroslurm.errors import UsageError
from hydroslurm.jobs.spec.fields import Count, Line, SlurmWord
from hydroslurm.jobs.spec.replicas import MOST_BYTES, CpusPerTask, Gpus, TasksPerNode
from hydroslurm.jobs.spec.sections import SbatchValue, ScriptOption

Gigabytes = Annotated[float, Field(gt=0, le=MOST_BYTES // 2**30, allow_inf_nan=False)]


class _Options(BaseModel):
    """By submitit's names. What is not listed is submitit's to check."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    name: Line | None = None
    partition: SlurmWord | None = None
    account: SlurmWord | None = None
    qos: SlurmWord | None = None
    timeout_min: Count | None = None
    nodes: Count | None = None
    tasks_per_node: TasksPerNode | None = None
    cpus_per_task: CpusPerTask | None = None
    gpus_per_node: Gpus | SlurmWord | None = None
    mem_gb: Gigabytes | None = None
    options: dict[ScriptOption, SbatchValue] | None = None


def check_options(given: Mapping[str, Any], *, spell: Callable[[str], str] = str) -> None:
    """Refuse values that no job can have, which Slurm would take: ``--nodes=-1`` is one node for
    it, and a time limit of 0 minutes none.

    Args:
        given: submitit's name -> value, and ``options``: those of sbatch. None: not given.
        spell: what the user calls the option of that name.

    Raises:
        UsageError: what is wrong with each, in one line.
    """
    try:
        _Options.model_validate(dict(given))
    except ValidationError as error:
        from hydroslurm.jobs.spec.problems import message_of

        wrong = {
            str(one["loc"][0]): message_of(one, one["loc"])
            for one in reversed(error.errors(include_url=False))
        }
        raise UsageError(
            "; ".join(f"{spell(name)}: {message}" for name, message in reversed(wrong.items()))
        ) from None

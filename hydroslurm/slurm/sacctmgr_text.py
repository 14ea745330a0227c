"""What sacctmgr prints of qualities of service -> frozen values. Pure."""

from __future__ import annotations

from hydroslurm.errors import UnreadableOutput
from hydroslurm.slurm import text
from hydroslurm.slurm.values import Qos

FIELDS = ("Name", "GraceTime", "PreemptMode", "Preempt")
"""The columns that ``read_qoses`` reads, in this order."""


def read_qoses(output: str) -> tuple[Qos, ...]:
    """Read ``sacctmgr -n -P show qos format=FIELDS``.

    Raises:
        UnreadableOutput: a row with another number of columns.
    """
    return tuple(
        text.read_record(_qos_of_cells, line.split("|"), line)
        for line in output.splitlines()
        if line.strip()
    )


def _qos_of_cells(cells: list[str]) -> Qos:
    if len(cells) != len(FIELDS):
        raise UnreadableOutput(f"sacctmgr printed a row without {len(FIELDS)} columns: {cells!r}")
    cell = dict(zip(FIELDS, cells, strict=True))
    mode = cell["PreemptMode"].upper()
    return Qos(
        name=cell["Name"],
        grace_time_s=text.parse_duration_s(cell["GraceTime"]) or 0,
        # "cluster" is how a QOS without a mode of its own prints
        preempt_mode="" if mode == "CLUSTER" else mode,
        preempts=tuple(name for name in cell["Preempt"].split(",") if name),
    )

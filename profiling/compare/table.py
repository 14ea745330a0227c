"""The comparison in docs/comparison.md: a Markdown table, and what cannot be read off it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BEGIN, END = "<!-- compare -->", "<!-- /compare -->"


@dataclass(frozen=True)
class Column:
    """A figure of each peer.

    Attributes:
        head: of the table, with the unit.
        axis: of the picture.
        absent: what is said where there was nothing to measure.
        zero: what is said of 0.
        digits: that count.
        logarithmic: the picture's axis.
        drawn: whether the picture has a panel for it.
    """

    key: str
    head: str
    axis: str
    absent: str = "–"
    zero: str = "0"
    digits: int = 3
    logarithmic: bool = False
    drawn: bool = True

    def text(self, value: float | bool | None) -> str:
        """A value as the table and the picture show it."""
        if value is None:
            return self.absent
        if isinstance(value, bool):
            return "yes" if value else "no"
        if value == 0:
            return self.zero
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.{self.digits}g}"


COLUMNS = (
    Column("goodput", "goodput", "goodput in the storm (undisturbed: 1)"),
    Column("steps_lost_per_preemption", "steps lost per preemption", "steps lost per preemption"),
    Column("samples_seen_twice", "samples seen twice", "samples seen twice in an epoch"),
    Column("samples_never_seen", "samples never seen", "samples never seen in an epoch"),
    Column("equal_bits", "the bits of an undisturbed run", "", drawn=False),
    Column("times_by_hand", "started again by hand", "", drawn=False),
    Column(
        "signal_to_parked_ms_p50",
        "signal → parked, ms",
        "signal → parked, median, ms",
        zero="0: in the same operator",
    ),
    Column(
        "resume_command_to_first_operator_ms_p50",
        "resume → first operator, ms",
        "resume command → first operator, median, ms",
    ),
    Column(
        "signal_to_durable_ms_p50",
        "signal → durable, ms",
        "signal → durable, median, ms",
        absent="never",
        logarithmic=True,
    ),
    Column("step_time_ratio", "step time / bare", "step time, undisturbed / bare", digits=4),
)


def measured(result: Mapping[str, Any]) -> list[Column]:
    """The columns that this result has something of: an older one knows nothing of newer figures,
    and an empty cell would say that there was nothing to measure."""
    there = {"times_by_hand"}.union(*result["peers"].values())
    return [column for column in COLUMNS if column.key in there]


def table(result: Mapping[str, Any]) -> str:
    """The table, where it was measured, and a remark on each peer."""
    columns = measured(result)
    lines = [
        f"| | version | {' | '.join(column.head for column in columns)} |",
        f"| --- | --- |{' --- |' * len(columns)}",
    ]
    peers = result["peers"]
    for peer in peers.values():
        shown = {**peer, "times_by_hand": len(peer["by_hand"])}
        cells = [column.text(shown.get(column.key)) for column in columns]
        if not peer["finished"]:
            cells[0] = "did not finish"
        lines.append(f"| {peer['title']} | {peer['version']} | {' | '.join(cells)} |")
    where = result["environment"]
    return "\n".join(
        [
            *lines,
            "",
            _storm(result),
            "",
            *(
                f"- **{peer['title']}**: {peer['remark']}{_by_hand(peer)}"
                for peer in peers.values()
            ),
            "",
            f"Measured {where['date']} on {where['cpu_count']} cores of {where['cpu_model']}, "
            f"Python {where['python']}, torch {where['torch']}, Slurm {result['slurm_version']}.",
        ]
    )


def _storm(result: Mapping[str, Any]) -> str:
    kinds = [event["kind"] for event in result["events"]]
    words = (
        f"The storm: {kinds.count('suspend')} suspends of some seconds, {kinds.count('preempt')} "
        f"urgent jobs and {kinds.count('requeue')} requeues by an operator, at the same moments "
        "for each. It is dense, and so goodput is low for everybody"
    )
    limit = result["goodput_limit"]
    if limit is None:
        return f"{words}."
    return f"{words}: {limit:.2f} is what the suspends and Slurm's own wait leave at most."


def _by_hand(peer: Mapping[str, Any]) -> str:
    states = sorted({how.rpartition(" ")[2] for how in peer["by_hand"]})
    return f" It was left {', '.join(states)}, and started again by hand." if states else ""

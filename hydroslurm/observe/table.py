"""What ``list``, ``status`` and ``top`` show of a job: each fact with its key in JSON and its
column, and tables that fit a width. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.cells import cell_len, set_cell_size

from hydroslurm.core.files import clean, moment
from hydroslurm.core.status import RankStatus
from hydroslurm.jobs.plan import Submission
from hydroslurm.observe.job import LOUD, JobView, WorkAtRisk
from hydroslurm.observe.training import member_of

NOTHING = "-"
_GAP = "  "


def _text(value: object) -> str:
    return clean(str(value))


@dataclass(frozen=True)
class Column:
    """One fact.

    Attributes:
        value: of a job; None is unknown: null, and a dash in a table.
        key: in JSON; "": only tables show it.
        title: in a table; "": only JSON has it.
        cell: the text of a value in a table.
        rank: higher ones are dropped first if there is no room; up to 9 fit into 80.
        least: minimum width.
        most: maximum width.
        shrinks_to: this if there is no room; 0: not at all.
        right: flush right, for numbers.
        optional: omit it if no job has any.
    """

    value: Callable[[JobView], Any]
    key: str = ""
    title: str = ""
    cell: Callable[[Any], str] = _text
    rank: int = 0
    least: int = 0
    most: int = 1000
    shrinks_to: int = 0
    right: bool = False
    optional: bool = False


def duration(seconds: float) -> str:
    """Format in at most five characters: ``42s 12m 3h05 2d03h 45d``."""
    whole = int(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if whole < 100:
        return f"{whole}s"
    if minutes < 100:
        return f"{minutes}m"
    if hours < 24:
        return f"{hours}h{minutes % 60:02d}"
    return f"{days}d{hours % 24:02d}h" if days < 10 else f"{days}d"


def rate(steps_per_s: float) -> str:
    """Format with three significant digits."""
    if steps_per_s >= 100:
        return f"{steps_per_s:.0f}"
    return f"{steps_per_s:.1f}" if steps_per_s >= 10 else f"{steps_per_s:.2f}"


def lost(loss: WorkAtRisk) -> str:
    """Format as ``0``, ``≤42 st`` (steps), ``≤3h05``, or ``?``."""
    if loss.is_nothing:
        return "0"
    if loss.steps is not None:
        return f"≤{loss.steps} st"
    return f"≤{duration(loss.seconds)}" if loss.seconds is not None else "?"


def _parked(row: JobView) -> str | None:
    return None if row.n_ranks is None else f"{row.parked}/{row.n_ranks}"


def _of_loss(name: str) -> Callable[[JobView], Any]:
    return lambda row: getattr(row.loss, name, None)


def _of_size(which: int) -> Callable[[JobView], int | None]:
    return lambda row: row.size and row.size[which]


_JOB = Column(lambda row: str(row.job.id), "job", "JOB")
_NAME = Column(lambda row: row.job.name, "name", "NAME", rank=5, least=6, most=30, shrinks_to=6)
_PARTITION = Column(lambda row: row.job.partition, "partition", "PARTITION", rank=12, most=14)
_SLURM = Column(lambda row: row.job.state.value, "slurm_state", "SLURM")
_NODES = Column(lambda row: list(row.job.nodes), "nodes")
_REQUEUES = Column(lambda row: row.job.restart_count, "restart_count", "PRE", rank=8, right=True)

TOP = (
    replace(_JOB, least=5),
    _NAME,
    Column(lambda row: row.job.user, "user", "USER", rank=13, most=12),
    _PARTITION,
    Column(lambda row: row.state, "state", "STATE", rank=1, least=9, most=10),
    replace(_SLURM, title=""),
    Column(lambda row: row.reason, "reason"),
    _NODES,
    Column(_parked, title="PARK", rank=3, least=4, right=True),
    Column(lambda row: row.parked, "parked"),
    Column(lambda row: row.n_ranks, "ranks"),
    Column(lambda row: row.size and "/".join(map(str, row.size)), title="SIZE", rank=3, least=4,
           right=True, optional=True),
    Column(lambda row: next((rank.cell for rank in row.slow), None), title="SLOW", rank=2,
           right=True, optional=True),
    Column(lambda row: row.step, "step", "STEP", rank=4, least=5, right=True),
    Column(lambda row: row.steps_per_s, "steps_per_s", "STEP/S", rate, rank=7, right=True),
    Column(lambda row: row.commit_step, "commit_step", "SAVED", rank=10, right=True),
    Column(lambda row: row.commit_age_s, "commit_age_s", "AGO", duration, rank=6, least=4,
           right=True),
    replace(_REQUEUES, key="preemptions"),
    Column(lambda row: row.pauses, "pauses"),
    Column(lambda row: row.vacated_bytes, "vacated_bytes"),
    Column(lambda row: row.goodput and vars(row.goodput), "goodput"),
    Column(lambda row: row.goodput and row.goodput.of_allocated, title="GOOD", cell=rate, rank=11,
           right=True),
    Column(lambda row: [rank._asdict() for rank in row.slow], "slow_ranks"),
    Column(lambda row: row.left_s, "left_s", "LEFT", duration, rank=9, least=5, right=True),
    Column(lambda row: row.loss, title="LOST", cell=lost, rank=2, least=7, right=True),
    Column(_of_loss("steps"), "lost_steps"),
    Column(_of_loss("seconds"), "lost_s"),
    Column(_of_loss("why"), "lost_why"),
    Column(lambda row: row.stuck, "stuck"),
    Column(_of_size(0), "size"),
    Column(_of_size(1), "size_wanted"),
    Column(_of_size(2), "size_max"),
    Column(lambda row: row.loss.why if row.loss else row.reason, title="WHY", rank=14, least=20,
           most=70, shrinks_to=20),
)  # fmt: skip


def _asked(row: JobView) -> Submission | None:
    return row.submission if row.has_spec else None


def _replicas(row: JobView) -> int | None:
    asked = _asked(row)
    return (len(row.rank_files) if asked is None else asked.replicas) or None


def _most_restarts(row: JobView) -> int | None:
    asked = _asked(row)
    return None if asked is None else asked.backoff_limit


def _restarts(row: JobView) -> str:
    most = _most_restarts(row)
    return f"{row.restarts}{'' if most is None else f'/{most}'}"


def _preemptions(row: JobView) -> str | None:
    known, is_least = row.known_preemptions
    return None if known is None else f"{'≥' if is_least else ''}{known}"


LIST = (
    _JOB,
    Column(lambda row: row.name, "name", "NAME", lambda name: clean(name[:30])),
    Column(lambda row: row.condition and vars(row.condition), "condition"),
    Column(lambda row: row.condition and row.condition.type, title="CONDITION"),
    _SLURM,
    Column(_replicas, "replicas", "REPLICAS"),
    Column(lambda row: row.restarts, "restarts"),
    Column(_most_restarts, "backoff_limit"),
    Column(_restarts, title="RESTARTS"),
    Column(lambda row: row.known_preemptions[0], "preemptions"),
    Column(lambda row: row.known_preemptions[1], "preemptions_at_least"),
    Column(_preemptions, title="PREEMPTIONS"),
    Column(lambda row: row.condition and row.condition.epoch_ns, title="SINCE", cell=moment),
)

_OF_RANKS = (
    "rank", "state", "causes", "step", "pid", "host", "restart_count", "pauses", "park_us",
    "committed_step", "world_size", "not_copied", "parked_together", "vacated_bytes", "vacate_s",
    "restore_s", "not_vacated", "is_lost", "first_collective_s",
)  # fmt: skip


def _rank(rank: RankStatus) -> dict[str, object]:
    all_parked, goodput = rank.all_parked, rank.goodput()
    return {
        **{name: getattr(rank, name) for name in _OF_RANKS},
        "goodput": goodput and vars(goodput),
        "since_epoch_ns": rank.since.epoch_ns,
        "all_parked_epoch_ns": None if all_parked is None else all_parked.epoch_ns,
    }


def _member(row: JobView) -> str | None:
    member = member_of(row.job)
    return None if member is None else member[1]


STATUS = (
    _JOB,
    Column(lambda row: row.job.job_id, "job_id"),
    _NAME,
    _SLURM,
    _PARTITION,
    _NODES,
    _REQUEUES,
    Column(lambda row: str(row.run.root), "run_dir"),
    Column(_member, "member"),
    Column(lambda row: row.problem, "problem"),
    Column(lambda row: row.condition and vars(row.condition), "condition"),
    Column(lambda row: list(map(_rank, row.ranks)), "ranks"),
    Column(lambda row: dict(row.silent), "silent"),
)


def as_json(columns: Sequence[Column], row: JobView) -> dict[str, Any]:
    """Return these columns as plain values; durations in seconds."""
    return {column.key: column.value(row) for column in columns if column.key}


_NAME_CELLS = 12
"""The name gets this much before the least important columns appear."""
_CORE_RANK = 9


def layout(columns: Sequence[Column], rows: Sequence[JobView], width: int) -> tuple[str, list[str]]:
    """Return the head, and one line per row, none wider than ``width`` cells."""
    titled = [column for column in columns if column.title]
    cells = {column: [_cell(column, row) for row in rows] for column in titled}
    wide = {column: _natural(column, texts) for column, texts in cells.items()}
    widths = {column: min(n, column.shrinks_to or n) for column, n in wide.items()}
    shown = [c for c in titled if not c.optional or any(text != NOTHING for text in cells[c])]
    name = titled[1]
    while len(shown) > 1:
        last = max(shown, key=lambda column: column.rank)
        spare = max(0, min(wide[name], _NAME_CELLS) - widths[name]) * (last.rank > _CORE_RANK)
        if _total(shown, widths) + spare <= width:
            break
        shown.remove(last)
    room = width - _total(shown, widths)
    for column in shown:  # the name grows first, then the reason
        grown = max(0, min(wide[column] - widths[column], room))
        widths[column] += grown
        room -= grown
    head = _line({column: column.title for column in shown}, widths, width)
    lines = [_line({c: cells[c][n] for c in shown}, widths, width) for n in range(len(rows))]
    return head, lines


def style(row: JobView) -> str:
    """Return rich's style: urgent rows stand out, even without colour."""
    if row.job.state in LOUD or row.stuck:
        return "bold red"
    if row.has_ended:
        return "dim"
    at_stake = row.loss is not None and not row.loss.is_nothing
    if row.parked or row.state in ("SUSPENDED", "STOPPING"):
        return "bold yellow" if at_stake else "cyan"
    return ""


def _cell(column: Column, row: JobView) -> str:
    value = column.value(row)
    return NOTHING if value is None else column.cell(value)


def _natural(column: Column, cells: Sequence[str]) -> int:
    head = cell_len(column.title)
    return min(max([head, column.least, *map(cell_len, cells)]), max(column.most, head))


def _total(shown: Sequence[Column], widths: Mapping[Column, int]) -> int:
    return sum(widths[column] for column in shown) + len(_GAP) * (len(shown) - 1)


def _line(cells: Mapping[Column, str], widths: Mapping[Column, int], width: int) -> str:
    parts = []
    for column, text in cells.items():
        room = widths[column]
        if cell_len(text) > room:
            text = set_cell_size(text, room - 1) + "…"
        pad = " " * (room - cell_len(text))
        parts.append(pad + text if column.right else text + pad)
    return set_cell_size(_GAP.join(parts), width).rstrip()

"""When the device worked: kernels, copies, memsets and graphs of a report, asked for by moments.

A report has millions of them. SQLite reads them once for each process, block by block, as they lie
in the file, which is nearly in the order of time; a moment then costs a look at the few blocks that
it lies in. (Sorting them by time would take ten times as long.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hydroslurm.report.nsys.database import Database, pid_of

TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "kernels",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "copies",
    "CUPTI_ACTIVITY_KIND_MEMSET": "memsets",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "graphs",
}
"""The last: graphs as a whole. Traced node by node they stand among the kernels."""
BLOCK = 8192


@dataclass(frozen=True)
class _Block:
    """One process's rows among :data:`BLOCK` that lie together."""

    table: str
    first_row: int
    first_start_ns: int
    last_start_ns: int
    last_end_ns: int


class Gpu:
    """What the device did for each process. Times are nsys's."""

    def __init__(self, database: Database, blocks: dict[int, list[_Block]]) -> None:
        """``blocks``: by globalPid."""
        self._database = database
        self._global_pids = {pid_of(one): one for one, held in blocks.items() if held}
        self._blocks = blocks

    @property
    def pids(self) -> frozenset[int]:
        """Processes that used a device."""
        return frozenset(self._global_pids)

    def last_end(self, pid: int, *, before_ns: int) -> int | None:
        """When the last of what started before a moment had ended, which may be after it."""
        ends: list[int] = []
        for block in self._of(pid):
            if block.last_start_ns < before_ns:
                ends.append(block.last_end_ns)
            elif block.first_start_ns < before_ns:
                ends += self._ask("MAX(end)", "start <", block, pid, before_ns)
        return max(ends, default=None)

    def first_start(self, pid: int, *, since_ns: int) -> int | None:
        starts: list[int] = []
        for block in self._of(pid):
            if block.first_start_ns >= since_ns:
                starts.append(block.first_start_ns)
            elif block.last_start_ns >= since_ns:
                starts += self._ask("MIN(start)", "start >=", block, pid, since_ns)
        return min(starts, default=None)

    def _of(self, pid: int) -> list[_Block]:
        return self._blocks[self._global_pids[pid]] if pid in self._global_pids else []

    def _ask(self, what: str, where: str, block: _Block, pid: int, ns: int) -> list[int]:
        sql = (
            f"SELECT {what} FROM {block.table} "
            f"WHERE rowid BETWEEN ? AND ? AND globalPid = ? AND {where} ?"
        )
        values = (block.first_row, block.first_row + BLOCK - 1, self._global_pids[pid], ns)
        rows = self._database.rows(sql, values, what=TABLES[block.table], if_any=(0,))
        return [row[0] for row in rows if row[0] is not None]


def read_gpu(database: Database, *, global_pids: Iterable[int]) -> Gpu:
    """What these processes did, from the tables that are there."""
    tables = [t for t in TABLES if {"start", "end", "globalPid"} <= database.columns(t)]
    return Gpu(
        database,
        {pid: [b for t in tables for b in _blocks(database, t, pid)] for pid in global_pids},
    )


def _blocks(database: Database, table: str, global_pid: int) -> list[_Block]:
    what = TABLES[table]
    # not MIN and MAX in one question, for which SQLite would read the whole table
    bounds = f"(SELECT MIN(rowid) FROM {table}), (SELECT MAX(rowid) FROM {table})"
    ((first, last),) = database.rows(f"SELECT {bounds}", what=what) or [(None, None)]
    if first is None or last - first > database.size_bytes:  # no table has rows without bytes
        return []
    sql = (
        f"SELECT MIN(start), MAX(start), MAX(end) FROM {table} "
        "WHERE rowid BETWEEN ? AND ? AND globalPid = ?"
    )
    blocks: list[_Block] = []
    for row in range(first, last + 1, BLOCK):
        values = (row, row + BLOCK - 1, global_pid)
        for found in database.rows(sql, values, what=what, if_any=(0, 1, 2)):
            if None not in found:
                blocks.append(_Block(table, row, *found))
    return blocks

"""What fresh memory costs a load: processor seconds per GB of a file that is in the page cache.

Interleaved, each the median of the rounds, each into memory of its own:

    read                read into one buffer, again and again: no fresh memory
    read_by_faults      read into fresh memory, whose pages come by a fault each
    read_populated      the same, its pages made by one call per MiB before (what a load does)
    faults, populated   the pages alone, either way
    mapped              map the file privately and read every page: no copy, no fresh memory
    mapped_written      then write to every page once, as a first optimizer step does: a fault and
                        a copy for each
    huge_populated      pages of 2 MiB. Cheap on real memory and while the guest still has blocks of
                        that size; dear where the host has taken them back
"""

from __future__ import annotations

import mmap
import os
import resource
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import finish, interleaved, parser, scratch

from hydroslurm.checkpoint.pages import populate

MIB = 1 << 20


class Bench:
    """One file, and what is done with it; each returns processor seconds per GB."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        with path.open("wb") as file:
            for _ in range(size_bytes // MIB):
                file.write(os.urandom(4096) * (MIB // 4096))
        self._fd = os.open(path, os.O_RDONLY)
        self._buffer = memoryview(bytearray(MIB))
        self._written_s = 0.0

    def read(self) -> float:
        return self._cost(lambda at: self._read(self._buffer, at))

    def read_by_faults(self) -> float:
        memory = self._fresh()
        return self._cost(lambda at: self._read(memory[at : at + MIB], at))

    def read_populated(self) -> float:
        memory = self._fresh()

        def one(at: int) -> None:
            populate(memory[at : at + MIB])
            self._read(memory[at : at + MIB], at)

        return self._cost(one)

    def faults(self) -> float:
        memory = self._fresh()
        return self._cost(lambda at: _touch(memory[at : at + MIB]))

    def populated(self) -> float:
        memory = self._fresh()
        return self._cost(lambda at: populate(memory[at : at + MIB]))

    def huge_populated(self) -> float:
        pages = mmap.mmap(-1, self._size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
        memory = memoryview(pages)
        return self._cost(lambda at: populate(memory[at : at + MIB]))

    def mapped(self) -> float:
        memory = memoryview(mmap.mmap(self._fd, self._size_bytes, access=mmap.ACCESS_COPY))
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        cost = self._cost(lambda at: whole[at : at + MIB : 64].sum())
        self._written_s = self._cost(lambda at: _touch(memory[at : at + MIB]))
        return cost

    def mapped_written(self) -> float:
        """Of the mapping of the last :meth:`mapped`."""
        self.mapped()
        return self._written_s

    def _fresh(self) -> memoryview:
        return memoryview(
            mmap.mmap(-1, self._size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        )

    def _read(self, into: memoryview, at: int) -> None:
        os.preadv(self._fd, [into], at)

    def _cost(self, one: Callable[[int], object]) -> float:
        before_s = _cpu_s()
        for at in range(0, self._size_bytes, MIB):
            one(at)
        return (_cpu_s() - before_s) / (self._size_bytes / 1e9)


def _touch(memory: memoryview) -> None:
    torch.frombuffer(memory, dtype=torch.uint8)[:: mmap.PAGESIZE].zero_()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    wanted = parser("What fresh memory costs a load.", directory=True)
    wanted.add_argument("--repeats", type=int, default=5, help="rounds")
    chosen = wanted.parse_args()
    torch.set_num_threads(1)
    with scratch("memory", chosen) as folder:
        bench = Bench(folder / "file", (16 if chosen.quick else 512) * MIB)
        names = ("read", "read_by_faults", "read_populated", "faults", "populated", "mapped")
        names = (*names, "mapped_written", "huge_populated")
        arms = {name: getattr(bench, name) for name in names}
        seen = interleaved(arms, rounds=2 if chosen.quick else chosen.repeats)
    result: dict[str, Any] = {
        f"{name}_cpu_s_per_gb": statistics.median(costs) for name, costs in seen.items()
    }
    finish(chosen, "Fresh memory, processor seconds per GB:", result)


if __name__ == "__main__":
    main()

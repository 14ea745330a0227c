"""What all profiling scripts share: options, percentiles, interleaving, the environment, the last
line."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydroslurm.core.events import Event, EventKind


@dataclass(frozen=True)
class Options:
    """What every script takes."""

    quick: bool
    json_only: bool


def options(description: str, argv: Sequence[str] | None = None) -> Options:
    """Read ``--quick`` and ``--json``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--quick", action="store_true", help="few rounds: to see that it runs, not how fast it is"
    )
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    arguments = parser.parse_args(argv)
    return Options(quick=arguments.quick, json_only=arguments.json)


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank, so that the figure is one that was seen; nan of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def p50_p99(name: str, values: Sequence[float]) -> dict[str, float]:
    """``{name}_p50`` and ``{name}_p99``; the unit is in the name."""
    return {f"{name}_p50": percentile(values, 50), f"{name}_p99": percentile(values, 99)}


def time_interleaved(
    step: Callable[[], object],
    arms: Mapping[str, Callable[[], AbstractContextManager[object]]],
    *,
    rounds: int,
    segment_s: float,
    limit_s: float = math.inf,
) -> dict[str, list[float]]:
    """Seconds per step of each arm in each round.

    A round runs every arm for ``segment_s``; the next round begins with the next arm, so that each
    comes first, second and last equally often. Entering an arm, and a third more steps to warm up,
    are not timed. After ``limit_s`` no new round begins.
    """
    steps = max(1, round(segment_s / _seconds_per_step(step)))
    seen: dict[str, list[float]] = {name: [] for name in arms}
    deadline = time.monotonic() + limit_s
    for index in range(rounds):
        if time.monotonic() > deadline:
            break
        first = index % len(arms)
        for name in [*list(arms)[first:], *list(arms)[:first]]:
            with arms[name]():
                for _ in range(max(1, steps // 3)):
                    step()
                begin = time.perf_counter()
                for _ in range(steps):
                    step()
                seen[name].append((time.perf_counter() - begin) / steps)
    return seen


def median_ratio(seen: Mapping[str, Sequence[float]], arm: str, base: str) -> float:
    """The median over the rounds of arm / base, both of the same round."""
    return statistics.median(a / b for a, b in zip(seen[arm], seen[base], strict=True))


def _seconds_per_step(step: Callable[[], object]) -> float:
    for _ in range(5):
        step()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < 0.1:
        step()
        count += 1
    return (time.perf_counter() - begin) / count


class EventTail:
    """Reads what is appended to a rank's event file, from another process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._pending: list[Event] = []

    def until(self, *kinds: EventKind, limit_s: float = 30.0) -> Event:
        """The next event of one of these kinds; the ones before it are let go.

        Raises:
            TimeoutError: it did not come.
        """
        deadline = time.monotonic() + limit_s
        while True:
            while self._pending:
                event = self._pending.pop(0)
                if event.kind in kinds:
                    return event
            if time.monotonic() > deadline:
                wanted = " or ".join(kind.value for kind in kinds)
                raise TimeoutError(f"no {wanted} in {self._path} within {limit_s:g} s")
            self._pending.extend(self._read())
            if not self._pending:
                time.sleep(0.001)

    def _read(self) -> Iterator[Event]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return
        whole, newline, _ = text.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.splitlines():
            yield Event.from_json(line.decode())


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    import torch

    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_count": os.cpu_count(),
        "cpu_model": _cpu_model(),
        "kernel": platform.release(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def finish(chosen: Options, title: str, result: Mapping[str, Any]) -> None:
    """Print the table, unless only JSON is wanted, and the JSON line last."""
    result = {key: _rounded(value) for key, value in result.items()}
    if not chosen.json_only:
        print(title)
        width = max(len(key) for key in result)
        for key, value in result.items():
            print(f"  {key:<{width}}  {value}")
    line = {"script": Path(sys.argv[0]).name, "quick": chosen.quick, **result}
    print(json.dumps({**line, "environment": environment()}), flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.5g}")
    return value

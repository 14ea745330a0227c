"""Long stories on a real Slurm that several tests look at, told side by side; and a fresh start for
a test that is run again (``pytest --reruns``), which would else look at the same failure.

A story that a failed test has looked at is told again when that test is run again. Its jobs are
ended before, for they may hold the nodes. Fixtures of a wider scope than one test are made anew,
too: what they hold may be spoiled. Only dev clusters stay.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
from processes import patience, wait_until

from hydroslurm.devcluster import DevCluster

T = TypeVar("T")
_ENDS_WITHIN_S = 60.0
"""A job that was cancelled, KillWait included."""


class Stories(Generic[T]):
    """All under way.

    Args:
        told: tells each story in a folder that is not there yet.
        clusters: where their jobs run.
    """

    def __init__(
        self,
        told: Mapping[str, Callable[[Path], T]],
        base: Path,
        *,
        clusters: tuple[DevCluster, ...],
        at_a_time: int,
    ) -> None:
        self._told = told
        self._base = base
        self._clusters = clusters
        self._pool = ThreadPoolExecutor(at_a_time)
        self._folders = {name: base / name for name in told}
        self._running: dict[str, Future[T]] = {}
        self._times = dict.fromkeys(told, 0)
        self._looked_at: set[str] = set()
        for name in told:
            self._tell(name)

    def result(self, name: str, limit_s: float) -> T:
        """What came of it; raises what it has raised."""
        if name not in self._running:
            _end_jobs(self._clusters, self._folders[name])
            self._tell(name)
        self._looked_at.add(name)
        return self._running[name].result(patience(limit_s))

    def next_test(self, *, again: bool) -> None:
        """A test begins; ``again``: the same one, and what it has looked at will be told again."""
        for name in self._looked_at if again else ():
            if name in self._running and self._running[name].done():
                del self._running[name]
        self._looked_at.clear()

    def end(self) -> None:
        """Begin no other one, and wait for those that are under way."""
        self._pool.shutdown(cancel_futures=True)

    def _tell(self, name: str) -> None:
        self._times[name] += 1
        if self._times[name] > 1:
            self._folders[name] = self._base / f"{name}-{self._times[name]}"
        self._running[name] = self._pool.submit(self._told[name], self._folders[name])


@contextlib.contextmanager
def stories(
    told: Mapping[str, Callable[[Path], T]],
    base: Path,
    *,
    clusters: tuple[DevCluster, ...],
    at_a_time: int,
) -> Iterator[Stories[T]]:
    """Those, until the tests have looked at them."""
    all_of_them = Stories(told, base, clusters=clusters, at_a_time=at_a_time)
    try:
        yield all_of_them
    finally:
        all_of_them.end()


def marked(request: pytest.FixtureRequest) -> set[str]:
    """The stories that ``scene`` marks of this session's tests name: only these need be told."""
    return {mark.args[0] for item in request.session.items for mark in item.iter_markers("scene")}


def result_of(request: pytest.FixtureRequest, under_way: Stories[T], limit_s: float) -> T:
    """Of the story that the test's mark names."""
    return under_way.result(request.node.get_closest_marker("scene").args[0], limit_s)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    """A test that is run again keeps nothing of its first run but the clusters."""
    again = getattr(item, "execution_count", 1) > 1
    for fixture in [one for name in item._fixtureinfo.name2fixturedefs.values() for one in name]:
        kept = fixture.cached_result[0] if fixture.cached_result else None
        if isinstance(kept, Stories):
            kept.next_test(again=again)
        elif again and fixture.baseid and not isinstance(kept, DevCluster):  # baseid: not pytest's
            fixture.finish(item._request)


def _end_jobs(clusters: tuple[DevCluster, ...], folder: Path) -> None:
    """Of all jobs that were submitted in this folder, or in one that is in it. A node that cannot
    end its part of one comes back without it."""
    stuck_mono_s = time.monotonic() + patience(_ENDS_WITHIN_S)

    def gone() -> bool:
        left = 0
        for cluster in clusters:
            asked = cluster.run(["squeue", "-h", "-o", "%i|%T|%N|%Z"]).stdout
            for job, state, nodes, submitted_in in (row.split("|") for row in asked.splitlines()):
                if not Path(submitted_in).is_relative_to(folder):
                    continue
                cluster.run(["scancel", job], check=False)
                left += 1
                if state == "COMPLETING" and time.monotonic() > stuck_mono_s:
                    for how in (("State=DOWN", "Reason=stuck"), ("State=RESUME",)):
                        cluster.run(["scontrol", "update", f"NodeName={nodes}", *how])
        return left == 0

    wait_until(gone, f"the end of the jobs of {folder}")

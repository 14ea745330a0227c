"""What a run of the suite contains, and what it says when it is done: which tests were repeated and
why, what each folder cost, and which one has grown past its budget.

``--long`` chooses among the tests marked ``long``: none of them (the default), all, or every tenth
one of each module, those whose turn it is: ten commits in a row run them all.

A test's processor seconds are those of its worker and of its children. Jobs of a dev cluster are
its daemons' children: they are in the machine's total only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import patience

COSTS = "hydroslurm_costs"
TENTHS = 10
BUDGET_S = 120.0
"""Processor seconds that a folder may take, on a quiet machine of today."""
_start = pytest.StashKey[tuple[float, float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hydroslurm's suite")
    group.addoption(
        "--long", choices=("none", "tenth", "all"), default="none", help="which long tests run"
    )
    group.addoption(
        "--most-repeated",
        type=int,
        metavar="N",
        help="fail if more than N tests needed --reruns",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tests that were not asked for."""
    chosen = config.getoption("--long")
    if chosen == "all":
        return
    tenth = _tenth(config.rootpath) if chosen == "tenth" else None
    left_out = []
    next_turn: dict[str, int] = {}
    for item in items:
        if item.get_closest_marker("long"):
            module = item.nodeid.partition("::")[0]
            turn = next_turn.get(module, zlib.crc32(module.encode()) % TENTHS)
            next_turn[module] = (turn + 1) % TENTHS
            if turn != tenth:
                left_out.append(item)
    if left_out:
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=left_out)


def _tenth(root: Path) -> int:
    """Which tenth is this commit's turn: 0 to 9. Without git, 0."""
    counted = subprocess.run(
        ["git", "rev-list", "--count", "HEAD"], cwd=root, capture_output=True, text=True
    )
    return int(counted.stdout or 0) % TENTHS


def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[_start] = (time.monotonic(), _machine_s())


def _processor_s() -> float:
    """Of this process, the children that it has waited for, and those that they are forked from."""
    zygote = sys.modules.get("zygote")
    return sum(os.times()[:4]) + (zygote.processor_s() if zygote else 0.0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A fixture that several tests share counts for the first that asked for it."""
    item.stash[_start] = (time.monotonic(), _processor_s())
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Each phase's report carries its costs to the process that writes the summary."""
    report: Any = yield
    wall, cpu = item.stash[_start]
    item.stash[_start] = now = (time.monotonic(), _processor_s())
    kept = [one for one in report.user_properties if one[0] != COSTS]
    report.user_properties = [*kept, (COSTS, (now[0] - wall, now[1] - cpu))]
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    _say_repeated(terminalreporter)
    _say_costs(terminalreporter)


def _say_repeated(terminalreporter: Any) -> None:
    """Each rerun and its reason; too many fail the run."""
    repeated = terminalreporter.stats.get("rerun", [])
    if repeated:
        terminalreporter.section("repeated, and why")
    for report in repeated:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash else str(report.longrepr)
        terminalreporter.write_line(f"{report.nodeid} ({report.when}): {reason[:400]}")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    most = session.config.getoption("--most-repeated")
    if reporter is None or most is None:
        return
    repeated = {report.nodeid for report in reporter.stats.get("rerun", [])}
    if len(repeated) > most:
        reporter.write_line(f"\n{len(repeated)} tests needed a rerun; {most} may", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _say_costs(terminalreporter: Any) -> None:
    """A table, the dearest folder first."""
    folders: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for reports in terminalreporter.stats.values():
        for report in reports:
            spent = dict(getattr(report, "user_properties", ())).get(COSTS)
            if spent is not None:
                folder = Path(report.nodeid.partition("::")[0]).parent
                row = folders["/".join(folder.parts[1:]) or "."]
                row[0] += spent[1]
                row[1] += spent[0]
                row[2] += report.when == "call"
    if not folders:
        return
    wall, busy = terminalreporter._session.stash[_start]
    terminalreporter.section("processor seconds, wall seconds and tests of each folder")
    budget_s = patience(BUDGET_S)
    for folder, (cpu, waited, tests) in sorted(folders.items(), key=lambda one: -one[1][0]):
        grown = f"  past its budget of {budget_s:.0f} s" if cpu > budget_s else ""
        terminalreporter.write_line(f"{cpu:8.0f} {waited:8.0f} {tests:6.0f}  {folder}{grown}")
    took, machine = time.monotonic() - wall, _machine_s() - busy
    terminalreporter.write_line(f"{machine:8.0f} {took:8.0f}         this machine, meanwhile")


def _machine_s() -> float:
    """Seconds that all processors of this machine have worked since it was started."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")

"""pytest's plugin of framework_tests.py, for the run with hydroslurm: what has to differ is
expected to, and what a test leaves behind is cleared away."""

from __future__ import annotations

import threading

import pytest

from hydroslurm.training import oversights

DIFFERENT = {
    "test_sigterm_handler_can_be_added": "SIGTERM stops the run, which leaves with status 75",
    **dict.fromkeys(
        [
            f"test_auto_requeue_custom_signal_flag[{signo}-{auto}]"
            for signo in (10, 12)
            for auto in (True, False)
        ],
        "Lightning's own handlers stand down, and ours are there",
    ),
    **dict.fromkeys(
        ("test_workers_are_shutdown[True-False]", "test_workers_are_shutdown[True-True]"),
        "persistent workers begin anew with each epoch, with random numbers that can be had again",
    ),
    "test_integration_with_trainer": "transformers' own checkpoint at SIGTERM stands down",
    "test_auto_batch_size_with_resume_from_checkpoint": "auto_find_batch_size is refused",
}
"""Test -> why it does not pass, and is not to."""


def pytest_configure() -> None:
    """Lightning's tests forbid threads that are new at their end. A fit has a controller of its
    own, whose place is taken by that of the process again: both have threads."""
    enumerate_all = threading.enumerate

    def without_ours() -> list[threading.Thread]:
        return [one for one in enumerate_all() if not one.name.startswith("hydroslurm-")]

    threading.enumerate = without_ours


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name in DIFFERENT:
            item.add_marker(pytest.mark.xfail(reason=DIFFERENT[item.name], strict=True))


def pytest_runtest_teardown() -> None:
    """A test may catch the exit at a stop, and go on in a process that was to end."""
    run = oversights._first()
    if run is not None:
        run.close()

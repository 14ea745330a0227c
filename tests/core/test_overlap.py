"""Small reads side by side where they wait, one after the other where they do not."""

from __future__ import annotations

import threading
import time

import pytest

from hydroslurm.core.overlap import SLOW_S, TRIED, overlapped


def test_order_and_place() -> None:
    """Results come in order; what waits is done by several threads, what does not by this one."""
    here = threading.get_ident()

    def slow(item: int) -> tuple[int, int]:
        time.sleep(2 * SLOW_S)
        return item, threading.get_ident()

    found = list(overlapped(slow, range(40)))
    assert [item for item, _ in found] == list(range(40))
    threads = [thread for _, thread in found]
    assert set(threads[:TRIED]) == {here}
    assert here not in threads[TRIED:]
    assert len(set(threads[TRIED:])) > 1
    assert list(overlapped(slow, range(2))) == [(0, here), (1, here)]
    assert list(overlapped(slow, ())) == []


def test_an_error_is_the_callers() -> None:
    """Also one that a thread met."""

    def broken(item: int) -> int:
        time.sleep(2 * SLOW_S)
        return 1 // (10 - item)

    with pytest.raises(ZeroDivisionError):
        list(overlapped(broken, range(20)))

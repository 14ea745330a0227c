"""Python's cycle collector is paused by several threads at the same time."""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack

from hydroslurm.core.garbage import without_gc


def test_the_collector_comes_back_with_the_last() -> None:
    """Whoever is done first leaves it paused for the other one; a child that is forked meanwhile
    has it, and what a script has disabled stays so."""
    first, second = ExitStack(), ExitStack()
    first.enter_context(without_gc())
    second.enter_context(without_gc())
    first.close()
    assert not gc.isenabled()
    if (pid := os.fork()) == 0:
        os._exit(not gc.isenabled())
    assert os.waitpid(pid, 0)[1] == 0
    second.close()
    assert gc.isenabled()
    gc.disable()
    try:
        with without_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

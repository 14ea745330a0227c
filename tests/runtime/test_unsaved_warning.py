"""Who is warned at the start that nobody saves; tests/integration/trainingjob/test_plain_jobs.py
has the warning itself."""

from __future__ import annotations

import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from submitit.core.job_environment import SignalHandler

from hydroslurm.core.jobid import JobId
from hydroslurm.runtime import unsaved_warning
from hydroslurm.runtime.unsaved_warning import (
    UPDATES,
    Training,
    _optimizers,
    handles_sigterm,
    what_is_lost,
)
from hydroslurm.slurm.policy import PreemptAction, SitePolicy


def test_only_where_a_preemption_stops_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that pauses, or never comes, costs nothing. A script with a handler of its own may save
    there; submitit's does nothing of the kind."""
    said = {
        one: what_is_lost(SitePolicy(action=one, action_why="X"), JobId(7)) for one in PreemptAction
    }
    assert said[PreemptAction.NEVER] is said[PreemptAction.PAUSE] is None
    assert str(said[PreemptAction.CANCEL]).startswith("a preemption ends this job for good (X), ")
    assert "requeues it (X)" in str(said[PreemptAction.REQUEUE])
    assert all("\n" not in str(words) for words in said.values())
    for handler in (signal.SIG_DFL, signal.SIG_IGN, SignalHandler.bypass, lambda *_: None):
        monkeypatch.setattr(signal, "getsignal", lambda _, handler=handler: handler)
        assert handles_sigterm() == (getattr(handler, "__name__", "") == "<lambda>")


def test_only_who_trains_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that has made its optimizer, and loads or waits, may make its Run next: nothing is
    known of it before parameters have changed again and again."""
    model = torch.nn.Linear(3, 1)
    others = _optimizers()  # tests that ran before in this process left them

    def ours() -> list[torch.optim.Optimizer]:
        return [one for one in _optimizers() if all(one is not other for other in others)]

    monkeypatch.setattr(unsaved_warning, "_optimizers", ours)
    training = Training()
    training.look()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training.look()
    model.load_state_dict(model.state_dict())
    training.look()
    training.look()
    assert (training.updates, training.quiet) == (1, 1)
    assert UPDATES > 1
    for _ in range(UPDATES):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        training.look()
    assert training.updates == 1 + UPDATES


def test_a_look_for_optimizers_disturbs_no_other_thread() -> None:
    """A tuple that somebody else refers to while it is made is a SystemError of Python's."""
    model = torch.nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(model.parameters()), torch.optim.AdamW(model.parameters())]
    until_s, interval_s = time.monotonic() + 0.5, sys.getswitchinterval()

    def look() -> None:
        while time.monotonic() < until_s:
            assert {id(one) for one in optimizers} <= {id(one) for one in _optimizers()}

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            looking = pool.submit(look)
            while not looking.done():
                assert tuple(number for number in range(50)) == tuple(range(50))
            looking.result()
    finally:
        sys.setswitchinterval(interval_s)

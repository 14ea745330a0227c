"""The signal plan: what the table says, and what is refused."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from hydroslurm.errors import UsageError
from hydroslurm.gate.protocol import Action, Cause
from hydroslurm.gate.signals import SignalPlan


def test_default_table_means_what_the_documentation_says() -> None:
    """TSTP and USR1 pause, CONT and USR2 resume their own kind only, TERM stops, INT ends every
    pause; HYDROSLURM_SIGNALS moves a signal and switches one off."""
    table = {rule.signo: rule for rule in SignalPlan().rules()}
    everything = Cause.SLURM | Cause.USER | Cause.API | Cause.TERMINAL | Cause.PEERS
    for signo, action, causes in (
        (signal.SIGTSTP, Action.PAUSE, Cause.SLURM),
        (signal.SIGUSR1, Action.PAUSE, Cause.USER),
        (signal.SIGUSR2, Action.RESUME, Cause.USER),
        (signal.SIGINT, Action.RESUME, everything),
    ):
        assert (table[signo].action, table[signo].causes) == (action, causes)
    assert table[signal.SIGCONT].action is Action.RESUME
    assert not table[signal.SIGCONT].causes & Cause.USER
    assert table[signal.SIGTERM].action is Action.STOP
    assert table[signal.SIGTERM].only_if_handled
    moved = SignalPlan().with_environment(
        {"HYDROSLURM_SIGNALS": "user_pause=RTMIN+3, user_resume=none"}
    )
    assert (moved.user_pause, moved.user_resume) == (signal.SIGRTMIN + 3, None)
    assert moved.slurm_pause == signal.SIGTSTP


def test_the_signal_of_submitit_is_the_warning() -> None:
    """Slurm sends it ahead of the time limit; where it is one of a pause's, there is no such pause.
    One that means to stop already changes nothing."""
    of = SignalPlan().with_environment
    stock = of({"SUBMITIT_EXECUTOR": "slurm"})
    assert (stock.user_pause, stock.user_resume, stock.warning) == (None, None, signal.SIGUSR2)
    chosen = of({"SUBMITIT_EXECUTOR": "slurm", "SUBMITIT_PREEMPT_SIGNAL": "XCPU"})
    assert chosen == replace(SignalPlan(), warning=signal.SIGXCPU)
    ours = of({"SUBMITIT_EXECUTOR": "local", "SUBMITIT_PREEMPT_SIGNAL": "URG"})
    assert ours == of({"SUBMITIT_PREEMPT_SIGNAL": "USR2"}) == SignalPlan()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "cannot read 'nonsense'"),
        ("who=USR1", "user_pause"),
        ("user_pause=USR9", "is not a signal"),
        ("user_pause=KILL", "cannot be caught|can catch"),
        ("user_pause=USR2", "used for both"),
        ("user_pause=999", "is not a signal"),
    ],
)
def test_bad_settings_are_refused_with_the_way_out(text: str, message: str) -> None:
    """A bad HYDROSLURM_SIGNALS says what was seen and what may stand there."""
    with pytest.raises(UsageError, match=message):
        SignalPlan().with_environment({"HYDROSLURM_SIGNALS": text})

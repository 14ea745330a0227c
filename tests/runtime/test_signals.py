"""The signal plan: what the table says, and what is refused."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from hydroslurm.core.signals import signal_name, signal_number
from hydroslurm.errors import UsageError
from hydroslurm.gate.protocol import Action, Cause
from hydroslurm.gate.signals import SignalPlan


def test_default_table_means_what_the_documentation_says() -> None:
    """TSTP and USR1 pause, CONT and USR2 resume their own kind only, TERM stops, INT ends every
    pause."""
    table = {rule.signo: rule for rule in SignalPlan().rules()}
    assert table[signal.SIGTSTP].action is Action.PAUSE
    assert table[signal.SIGTSTP].causes == Cause.SLURM
    assert table[signal.SIGUSR1].causes == Cause.USER
    assert table[signal.SIGCONT].action is Action.RESUME
    assert not table[signal.SIGCONT].causes & Cause.USER
    assert table[signal.SIGUSR2].causes == Cause.USER
    assert table[signal.SIGTERM].action is Action.STOP
    assert table[signal.SIGTERM].only_if_handled
    assert table[signal.SIGINT].action is Action.RESUME
    everything = Cause.SLURM | Cause.USER | Cause.API | Cause.TERMINAL | Cause.PEERS
    assert table[signal.SIGINT].causes == everything


def test_environment_changes_the_plan() -> None:
    """HYDROSLURM_SIGNALS moves a signal and switches one off."""
    plan = SignalPlan().with_environment(
        {"HYDROSLURM_SIGNALS": "user_pause=RTMIN+3, user_resume=none"}
    )
    assert plan.user_pause == signal.SIGRTMIN + 3
    assert plan.user_resume is None
    assert plan.slurm_pause == signal.SIGTSTP


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


def test_names_and_numbers_are_each_others_inverse() -> None:
    """Every named signal survives the way through text."""
    for known in signal.Signals:
        assert signal_number(signal_name(known)) == known

"""Signals by name and by number, as people, Slurm and the kernel write them."""

from __future__ import annotations

import signal as signals

from hydroslurm.errors import UsageError


def signal_number(signal: str | int) -> int:
    """The number of a signal.

    Args:
        signal: ``"USR1"``, ``"SIGUSR1"``, ``"RTMIN+2"``, ``"10"``, ``10`` or ``signal.SIGUSR1``;
            case does not matter.

    Raises:
        UsageError: no such signal on this machine.
    """
    number = _number_of(signal) if isinstance(signal, str) else int(signal)
    # not signals.Signals(number): between RTMIN and RTMAX they have numbers only
    if number not in signals.valid_signals():
        raise UsageError(f"{signal!r} is not a signal; write for example USR1, URG or RTMIN+2")
    return number


def signal_name(signo: int) -> str:
    """``SIGUSR1`` for 10; ``signal 35`` where it has no name."""
    try:
        return signals.Signals(signo).name
    except ValueError:
        return f"signal {signo}"


def _number_of(text: str) -> int | None:
    """None for text that has not the form of a signal."""
    word, plus, offset = text.strip().upper().partition("+")
    if plus and not offset.isdecimal():
        return None
    if word.isdecimal():
        return None if plus else int(word)
    known = signals.Signals.__members__.get(word if word.startswith("SIG") else f"SIG{word}")
    return None if known is None else int(known) + int(offset or 0)

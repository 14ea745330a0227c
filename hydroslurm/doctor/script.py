"""The options that a batch script gives itself. Pure."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

DEFAULT_WARNING_S = 60
"""Slurm's, for ``--signal=USR1`` without ``@``."""

_SIGNAL = re.compile(r"(?:(?P<who>[BR]+):)?(?P<name>\w+)(?:@(?P<seconds>\d+))?")
# each of these starts the ranks itself, where signals to srun's tasks may not come to
_LAUNCHERS = re.compile(
    r"\b(torchrun|torch\.distributed\.(?:run|launch)|accelerate launch|deepspeed)\b"
)


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """What ``#SBATCH`` lines say; options on sbatch's command line are not seen.

    Attributes:
        warning: the signal of ``--signal``, ``URG``; empty without.
        warning_s: how long before the time limit; None without.
        batch_shell_only: it is sent to the batch shell (``B:``) and to no rank.
        appends: --open-mode=append is given.
        launcher: a program between srun and the ranks, ``torchrun``; empty for none.
    """

    warning: str = ""
    warning_s: int | None = None
    batch_shell_only: bool = False
    appends: bool = False
    launcher: str = ""


def read_script(text: str) -> ScriptOptions:
    """Read a batch script. Slurm reads its options up to the first command."""
    options = _options(text)
    signal = _SIGNAL.fullmatch(options.get("signal", ""))
    seconds = signal["seconds"] if signal else None
    launcher = _LAUNCHERS.search(_commands(text))
    return ScriptOptions(
        warning=signal["name"] if signal else "",
        warning_s=int(seconds or DEFAULT_WARNING_S) if signal else None,
        batch_shell_only=bool(signal and "B" in (signal["who"] or "")),
        appends=options.get("open-mode", "").startswith("a"),
        launcher=launcher[1] if launcher else "",
    )


def _options(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if not line.startswith("#SBATCH"):
            continue
        words = _words(line.removeprefix("#SBATCH"))
        for word, following in zip(words, [*words[1:], ""], strict=True):
            if word.startswith("--"):
                name, _, value = word.removeprefix("--").partition("=")
                found[name] = value or following
    return found


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quote without its other half: Slurm complains of it, not we
        return line.split()


def _commands(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))

"""The options in a batch script, and what it starts. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

DEFAULT_WARNING_S = 60
"""Slurm's, for ``--signal=USR1`` without ``@``."""

_SIGNAL = re.compile(r"(?:(?P<who>[BR]+):)?(?P<name>\w+)(?:@(?P<seconds>\d+))?")
# each of these starts the ranks itself, where signals to srun's tasks may not reach them
_LAUNCHERS = re.compile(
    r"\b(torchrun|torch\.distributed\.(?:run|launch)|accelerate launch|deepspeed)\b"
)
_AGENT = re.compile(r"\bhydroslurm(?:\.cli)?\s+agent\b")
_SRUN = re.compile(r"(?:^|[\s;&|(])srun\s")
_KILLS = re.compile(r"(?:^|\s)(?:--kill-on-bad-exit(?!=0)|-K(?!0)\d*)(?=[\s=]|$)")
_PMIX = re.compile(r"--mpi[= ]['\"]?(pmix\w*)")
_NO_PMIX = re.compile(r"--mpi[= ]['\"]?(?!pmix)\w")
_FIXED_PORTS = (
    re.compile(r"\bMASTER_PORT=['\"]?([1-9]\d*)\b"),
    re.compile(r"--master[-_]port[= ]['\"]?([1-9]\d*)\b"),
    re.compile(r"--rdzv[-_]endpoint[= ]\S+?:([1-9]\d*)\b"),
)
_SETTING = re.compile(r"\b((?:TORCH|NCCL|GLOO|SLURM)_[A-Z_]+|keep_alive_\w+)=['\"]?([\w.]+)")


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """What ``#SBATCH`` lines and commands say; options on sbatch's command line are unknown.

    Attributes:
        warning: the signal of ``--signal``, such as ``URG``; empty without.
        warning_s: how long before the time limit it is sent; None without.
        batch_shell_only: it is sent to the batch shell only (``B:``).
        appends: ``--open-mode=append`` is given.
        launcher: a program between srun and the ranks, such as ``torchrun``; empty for none.
        has_agent: ``hydroslurm agent`` starts the ranks.
        tasks: number of tasks, as far as the script says.
        outlives_ranks: some srun does not end its other tasks when one fails.
        outlives_nodes: ``--no-kill`` is given: the death of a node is no end of the job.
        mpi: of ``srun --mpi``: ``pmix`` or ``other``; empty if not given.
        is_expedited: ``--requeue=expedite`` is given.
        fixed_port: port of the ranks' rendezvous if it is a constant; else empty.
        settings: environment variables of torch and NCCL, and the rendezvous' keep-alive.
    """

    warning: str = ""
    warning_s: int | None = None
    batch_shell_only: bool = False
    appends: bool = False
    launcher: str = ""
    has_agent: bool = False
    tasks: int = 1
    outlives_ranks: bool = False
    outlives_nodes: bool = False
    mpi: str = ""
    is_expedited: bool = False
    fixed_port: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)


def read_script(text: str) -> ScriptOptions:
    """Read a batch script. Slurm reads its options up to the first command."""
    options = _options(text)
    signal = _SIGNAL.fullmatch(options.get("signal", ""))
    seconds = signal["seconds"] if signal else None
    commands = _commands(text)
    launcher = _LAUNCHERS.search(commands)
    settings = dict(_SETTING.findall(commands))
    return ScriptOptions(
        warning=signal["name"] if signal else "",
        warning_s=int(seconds or DEFAULT_WARNING_S) if signal else None,
        batch_shell_only=bool(signal and "B" in (signal["who"] or "")),
        appends=options.get("open-mode", "").startswith("a"),
        launcher=launcher[1] if launcher else "",
        has_agent=bool(_AGENT.search(commands)),
        tasks=_tasks(options),
        outlives_ranks=_outlives_ranks(commands, settings),
        outlives_nodes=options.get("no-kill", "off") != "off",
        mpi=_mpi(commands),
        is_expedited=options.get("requeue", "").lower().startswith("expedite"),
        fixed_port=_fixed_port(commands),
        settings=settings,
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
            elif word == "-k":
                found["no-kill"] = ""
            elif word.startswith(("-n", "-N")):
                found[{"-n": "ntasks", "-N": "nodes"}[word[:2]]] = word[2:] or following
    return found


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # an unbalanced quote: Slurm will complain
        return line.split()


def _commands(text: str) -> str:
    """The lines that are run; continued lines are joined."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return "\n".join(lines).replace("\\\n", " ")


def _tasks(options: Mapping[str, str]) -> int:
    """``--nodes=2-4`` counts as 2."""
    counts = {
        name: int(match[0])
        for name in ("ntasks", "nodes", "ntasks-per-node")
        if (match := re.match(r"\d+", options.get(name, "")))
    }
    return counts.get("ntasks") or counts.get("nodes", 1) * counts.get("ntasks-per-node", 1)


def _outlives_ranks(commands: str, settings: Mapping[str, str]) -> bool:
    if settings.get("SLURM_KILL_BAD_EXIT", "0") != "0":
        return False
    sruns = [line for line in commands.splitlines() if _SRUN.search(line)]
    return any(not _KILLS.search(line) for line in sruns)


def _mpi(commands: str) -> str:
    if _PMIX.search(commands):
        return "pmix"
    return "other" if _NO_PMIX.search(commands) else ""


def _fixed_port(commands: str) -> str:
    found = (pattern.search(commands) for pattern in _FIXED_PORTS)
    return next((match[1] for match in found if match), "")

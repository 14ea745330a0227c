"""A batch script's options, and the programs it starts. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hydroslurm.errors import UsageError
from hydroslurm.gate.signals import SIGNALS_ENV, SignalPlan
from hydroslurm.slurm.stops import LimitWarning, script_options

# each of these starts the ranks itself, so signals to srun's tasks may not reach them
_LAUNCHERS = re.compile(
    r"\b(torchrun|torch\.distributed\.(?:run|launch)|accelerate launch|deepspeed)\b"
)
_BATCH = re.compile(r"\bhydroslurm(?:\.cli)?\s+batch\b")
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
_SIGNALS = re.compile(rf"\b{SIGNALS_ENV}=['\"]?([^\s'\";]+)")
_SETTING = re.compile(r"\b((?:TORCH|NCCL|GLOO|SLURM)_[A-Z_]+|keep_alive_\w+)=['\"]?([\w.]+)")


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """Contents of ``#SBATCH`` lines and commands; sbatch's command-line options are unknown.

    Attributes:
        warning: the request in ``--signal``; None without.
        signals: HYDROSLURM_SIGNALS, as set in the script.
        appends: whether ``--open-mode=append`` is set.
        launcher: a program between srun and the ranks, such as ``torchrun``; empty for none.
        has_agent: whether ``hydroslurm agent`` starts the ranks.
        tasks: number of tasks, as far as the script says.
        outlives_ranks: some srun does not end its other tasks when one fails.
        outlives_nodes: ``--no-kill`` is set: a node's death does not end the job.
        mpi: of ``srun --mpi``: ``pmix`` or ``other``; empty if not set.
        is_expedited: whether ``--requeue=expedite`` is set.
        shrinks_memory: of ``--mem-update`` (26.05), MARGIN@DELAY; empty if not set.
        fixed_port: port of the ranks' rendezvous if it is a constant; else empty.
        settings: environment variables of torch and NCCL, and the rendezvous' keep-alive.
    """

    warning: LimitWarning | None = None
    signals: str = ""
    appends: bool = False
    launcher: str = ""
    has_agent: bool = False
    tasks: int = 1
    outlives_ranks: bool = False
    outlives_nodes: bool = False
    mpi: str = ""
    is_expedited: bool = False
    shrinks_memory: str = ""
    fixed_port: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def saves_at_warning(self) -> bool:
        """Whether the ranks get the warning and treat it as one; a pause's signal counts as one
        near the limit."""
        try:
            plan = SignalPlan().with_environment({SIGNALS_ENV: self.signals})
        except UsageError:  # install() rejects it
            plan = SignalPlan()
        known = {*plan.stopping(), plan.user_pause, plan.user_resume}
        warning = self.warning
        return warning is not None and not warning.batch_shell_only and warning.signo in known


def read_script(text: str) -> ScriptOptions:
    """Read a batch script. Slurm reads options up to the first command."""
    options = script_options(text)
    commands = _commands(text)
    settings = dict(_SETTING.findall(commands))
    warning = LimitWarning.parse(options.get("signal", ""))
    if warning is not None and _BATCH.search(commands):  # `batch` forwards signals
        warning = replace(warning, batch_shell_only=False)
    return ScriptOptions(
        warning=warning,
        signals=_first(_SIGNALS, commands),
        appends=options.get("open-mode", "").startswith("a"),
        launcher=_first(_LAUNCHERS, commands),
        has_agent=bool(_AGENT.search(commands)),
        tasks=_tasks(options),
        outlives_ranks=_outlives_ranks(commands, settings),
        outlives_nodes=options.get("no-kill", "off") != "off",
        mpi=_mpi(commands),
        is_expedited=options.get("requeue", "").lower().startswith("expedite"),
        shrinks_memory=options.get("mem-update", ""),
        fixed_port=_fixed_port(commands),
        settings=settings,
    )


def _commands(text: str) -> str:
    """Return the command lines; continued lines are joined."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return "\n".join(lines).replace("\\\n", " ")


def _tasks(options: Mapping[str, str]) -> int:
    """Return the number of tasks; ``--nodes=2-4`` counts as 2."""
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
    return next(filter(None, (_first(pattern, commands) for pattern in _FIXED_PORTS)), "")


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""

"""The figures in docs/performance.md, and the headlines of README: made from
profiling/results/*.json, and from nowhere else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures -->", "<!-- /figures -->"

Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Row:
    """One line of the table: a figure of a script, its goal, and the incumbent's beside it."""

    what: str
    script: str
    key: str
    unit: str = ""
    goal: str = ""
    incumbent_key: str = ""


ROWS = (
    Row(
        "step time, installed and not paused / bare",
        "overhead",
        "ratio_installed",
        goal="≤ 1.01",
        incumbent_key="ratio_module_hooks",
    ),
    Row("… its NVTX marks, while no tool listens / without them", "overhead", "ratio_marks"),
    Row("… with our module-hook fallback / bare", "overhead", "ratio_fallback"),
    Row(
        "points per step of a small MLP where a rank can be held",
        "overhead",
        "gate_points_per_step_native",
        incumbent_key="gate_points_per_step_hooks",
    ),
    Row(
        "kill → first operator held, median",
        "pause_latency",
        "pause_us_p50",
        "µs",
        "≤ 150",
        "incumbent_pause_us_p50",
    ),
    Row("… 99th percentile", "pause_latency", "pause_us_p99", "µs", "", "incumbent_pause_us_p99"),
    Row(
        "kill → first operator released, median",
        "pause_latency",
        "resume_us_p50",
        "µs",
        "≤ 100",
        "incumbent_resume_us_p50",
    ),
    Row("… 99th percentile", "pause_latency", "resume_us_p99", "µs", "", "incumbent_resume_us_p99"),
    Row(
        "held inside a backward of more than 2 s",
        "pause_latency",
        "parked_inside_backward",
        goal="1.0",
        incumbent_key="incumbent_parked_inside_backward",
    ),
    Row(
        "`scontrol suspend` → parked, median",
        "suspend_latency",
        "command_to_parked_ms_p50",
        "ms",
        "≤ 30",
    ),
    Row("… 99th percentile", "suspend_latency", "command_to_parked_ms_p99", "ms"),
    Row("parked before Slurm's SIGSTOP", "suspend_latency", "parked_before_sigstop", goal="1.0"),
    Row(
        "`scontrol resume` → running, median",
        "suspend_latency",
        "resume_command_to_running_ms_p50",
        "ms",
    ),
    Row(
        "durable throughput of a save / plain write + fsync",
        "save",
        "save_ratio_to_disk",
        goal="≥ 0.8",
        incumbent_key="torch_save_ratio_to_disk",
    ),
    Row("stall of a periodic save / copy in memory", "save", "stall_ratio_to_memcpy", goal="≤ 1.5"),
    Row("a stop of 516 MB, asked → committed, median", "save", "stop_to_durable_ms", "ms"),
    Row("steps lost in 12 real requeues", "stop", "steps_lost", goal="0"),
    Row("SIGTERM → committed, median", "stop", "sigterm_to_durable_ms_p50", "ms"),
    Row("… 99th percentile", "stop", "sigterm_to_durable_ms_p99", "ms"),
    Row("committed → requeued, median", "stop", "durable_to_requeued_ms_p50", "ms"),
    Row("eligible again → first step, median", "stop", "eligible_to_first_step_ms_p50", "ms"),
    Row("500 MB, KillWait 5 s: committed of 20 preemptions", "killwait", "committed", goal="20"),
    Row(
        "… SIGTERM → committed, slowest",
        "killwait",
        "sigterm_to_durable_ms_max",
        "ms",
        "≤ 4670",
    ),
    Row(
        "submitit: steps lost in 4 preemptions and requeues",
        "stock_submitit",
        "steps_lost_executor",
        goal="0",
        incumbent_key="steps_lost_stock",
    ),
    Row(
        "step time of DDP on 2 ranks, in a Run / bare; peer: a flag summed in each step",
        "ranks",
        "per_step_cost_ratio",
        goal="≤ 1.01",
        incumbent_key="per_step_cost_ratio_flag",
    ),
    Row(
        "largest difference of the ranks' last steps, 20 stops of 2 ranks and 20 of 4",
        "ranks",
        "stop_skew_steps",
        goal="0",
    ),
    Row(
        "signal at one of 2 ranks → the common step is known to all, median",
        "ranks",
        "common_step_known_ms_2_p50",
        "ms",
    ),
    Row("… of 4 ranks", "ranks", "common_step_known_ms_4_p50", "ms"),
    Row(
        "signal → both of 2 ranks parked at one collective, median",
        "ranks",
        "signal_to_all_parked_ms_2_p50",
        "ms",
    ),
    Row("… 99th percentile", "ranks", "signal_to_all_parked_ms_2_p99", "ms"),
    Row("… all of 4 ranks, median", "ranks", "signal_to_all_parked_ms_4_p50", "ms"),
    Row("… 99th percentile", "ranks", "signal_to_all_parked_ms_4_p99", "ms"),
    Row(
        "resume → 2 ranks released, median",
        "ranks",
        "resume_to_all_released_ms_2_p50",
        "ms",
    ),
    Row(
        "SIGTERM → joint checkpoint of 37 MB committed, 2 ranks, median",
        "ranks",
        "signal_to_all_durable_ms_2_p50",
        "ms",
    ),
    Row("… 4 ranks", "ranks", "signal_to_all_durable_ms_4_p50", "ms"),
    Row(
        "suspends of 10 × the collectives' timeout survived by 4 ranks (DDP), of 10; peer: without",
        "long_suspend",
        "continued_ddp",
        goal="10",
        incumbent_key="continued_without",
    ),
    Row("… FSDP2", "long_suspend", "continued_fsdp", goal="10"),
    Row(
        "start of a Python that has the package, not asked for / that has not",
        "startup",
        "python_start_ratio",
        goal="≤ 1.02",
    ),
    Row("`hydroslurm --help`, median", "startup", "help_s", "s", "≤ 0.3"),
    Row(
        "`hydroslurm submit job.yaml` → first operator; peer: sbatch and srun",
        "startup",
        "submit_to_first_operator_s",
        "s",
        incumbent_key="sbatch_to_first_operator_s",
    ),
    Row(
        "`hydroslurm top` of 1,000 running jobs: requests to slurmctld per refresh",
        "scale",
        "rpcs_per_interval",
        goal="≤ 1",
    ),
    Row(
        "… processor time per refresh, squeue's included",
        "scale",
        "top_cpu_s_per_interval_1000",
        "s",
    ),
    Row("… memory", "scale", "rss_mb", "MB"),
    Row("… cost at 1,000 jobs / 100 × cost at 10", "scale", "growth_ratio", goal="≤ 1"),
    Row(
        "`hydroslurm report` of a rank with 55 pauses and 10 requeues, pictures included, median",
        "report_speed",
        "report_s_50_pauses",
        "s",
        "≤ 2",
    ),
    Row("… of a million events", "report_speed", "report_s_1m_events", "s", "≤ 20"),
    Row("… memory of all its processes", "report_speed", "report_peak_mb_1m_events", "MB", "≤ 500"),
    Row("GPU: step time, installed / bare", "gpu_check", "ratio_installed", goal="≤ 1.01"),
    Row("GPU: kill → parked, median", "gpu_check", "pause_to_parked_us_p50", "µs"),
    Row("GPU: kill → drained, median", "gpu_check", "pause_to_drained_ms_p50", "ms"),
    Row("GPU: same bits with and without pauses", "gpu_check", "bit_identical_with_pauses"),
)


HEADLINES = (
    ("overhead", "ratio_installed"),
    ("pause_latency", "pause_us_p50"),
    ("suspend_latency", "command_to_parked_ms_p50"),
    ("stop", "sigterm_to_durable_ms_p50"),
    ("stock_submitit", "steps_lost_executor"),
    ("long_suspend", "continued_ddp"),
)
"""The rows of README, by script and key."""


def load(folder: Path) -> Results:
    """Script name -> what it printed, of those that were measured in full."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {name: result for name, result in found.items() if not result["quick"]}


def table(results: Results) -> str:
    """The rows that there are results for, as Markdown, with where they were measured."""
    lines = [
        "| what | hydroslurm | goal | peer | script |",
        "| --- | --- | --- | --- | --- |",
    ]
    used: dict[str, None] = {}
    for row in ROWS:
        result = results.get(row.script, {})
        value = result.get(row.key)
        if value is None:
            continue
        used[_measured_on(result)] = None
        theirs = _text(result.get(row.incumbent_key), row.unit)
        ours = _text(value, row.unit)
        lines.append(f"| {row.what} | {ours} | {row.goal} | {theirs} | `{row.script}.py` |")
    return "\n".join([*lines, "", *(f"Measured {place}." for place in used)])


def headlines(results: Results) -> str:
    """README's few rows, as Markdown."""
    rows = {(row.script, row.key): row for row in ROWS}
    lines = ["| what | hydroslurm | peer |", "| --- | --- | --- |"]
    for script, key in HEADLINES:
        row, result = rows[script, key], results.get(script, {})
        if result.get(key) is not None:
            theirs = _text(result.get(row.incumbent_key), row.unit) or "–"
            lines.append(f"| {row.what} | {_text(result[key], row.unit)} | {theirs} |")
    return "\n".join(lines)


def replace_between(text: str, block: str, *, begin: str = BEGIN, end: str = END) -> str:
    """``text`` with what is between the two markers replaced.

    Raises:
        ValueError: the markers are not there, once each and in order.
    """
    head, begins, rest = text.partition(begin)
    _, ends, tail = rest.partition(end)
    if not begins or not ends or begin in rest or end in tail:
        raise ValueError(f"wanted one {begin!r} and after it one {end!r} in the text")
    return f"{head}{begin}\n{block}\n{end}{tail}"


def _text(value: Any, unit: str) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:.4g}" if isinstance(value, float) and not value.is_integer() else f"{value:g}"
    return f"{text} {unit}".strip()


def _measured_on(result: Mapping[str, Any]) -> str:
    where = result["environment"]
    processor = result.get("gpu") or f"{where['cpu_count']} cores of {where['cpu_model']}"
    return f"{where['date']} on {processor}, Python {where['python']}, torch {where['torch']}"

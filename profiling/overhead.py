"""What being pausable costs while nothing is paused.

Arms, interleaved in one process: bare; hydroslurm installed; our own module-hook fallback; the
incumbent's module hooks; hydroslurm without its NVTX marks, for which no tool listens here
(``ratio_marks``: with / without). The ratio of each to bare is the median over the rounds;
``ratio_bare_again`` is bare / bare, measured in the same way: how far from 1 the machine alone
brings it.
"""

from __future__ import annotations

import statistics
import tempfile
import warnings
from argparse import Namespace
from pathlib import Path

import steps
import torch
from harness import bare, finish, installed, median_ratio, options, time_interleaved
from incumbent import Incumbent

from hydroslurm.gate import GateKind, open_gate


def measure(
    name: str, training: steps.Training, run_dir: Path, chosen: Namespace
) -> dict[str, float]:
    """The ratios of one model, and how many points a step of it has where it can be held."""
    # What must be told apart by one percent is measured alone. Every arm has been installed and
    # uninstalled just before: these touch much memory, and cold caches would count against one arm.
    pair = time_interleaved(
        training.step,
        {
            "bare": lambda: bare(run_dir),
            "installed": lambda: installed(run_dir, "native"),
            "unmarked": lambda: installed(run_dir, "native", nvtx="off"),
            "again": lambda: bare(run_dir),
        },
        rounds=3 if chosen.quick else 240,
        segment_s=0.01 if chosen.quick else 0.05,
    )
    hooks = time_interleaved(
        training.step,
        {
            "bare": lambda: bare(run_dir),
            "fallback": lambda: installed(run_dir, "hooks"),
            "module_hooks": lambda: Incumbent(training.model),
        },
        rounds=2 if chosen.quick else 40,
        segment_s=0.01 if chosen.quick else 0.05,
    )
    return {
        f"ratio_installed_{name}": median_ratio(pair, "installed", "bare"),
        f"ratio_marks_{name}": median_ratio(pair, "installed", "unmarked"),
        f"ratio_bare_again_{name}": median_ratio(pair, "again", "bare"),
        f"ratio_fallback_{name}": median_ratio(hooks, "fallback", "bare"),
        f"ratio_module_hooks_{name}": median_ratio(hooks, "module_hooks", "bare"),
        f"step_us_{name}": 1e6 * statistics.median(pair["bare"]),
        f"gate_points_per_step_native_{name}": gate_points(training, "native"),
        f"gate_points_per_step_fallback_{name}": gate_points(training, "hooks"),
        f"gate_points_per_step_module_hooks_{name}": hook_calls(training),
    }


def gate_points(training: steps.Training, gate: GateKind) -> int:
    """How many operators of one step come by the gate."""
    training.step()
    with open_gate(gate).trace(0) as trace:
        training.step()
    return trace.count


def hook_calls(training: steps.Training) -> int:
    """How many hooks of the incumbent run in one step."""
    with Incumbent(training.model) as incumbent:
        training.step()
        calls: int = incumbent.calls
    return calls


def main() -> None:
    chosen = options("What being pausable costs while nothing is paused.")
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    result: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, training in (("mlp", steps.mlp()), ("transformer", steps.transformer())):
            result |= measure(name, training, Path(folder), chosen)
    for arm in ("installed", "marks", "bare_again", "fallback", "module_hooks"):
        result[f"ratio_{arm}"] = max(result[f"ratio_{arm}_mlp"], result[f"ratio_{arm}_transformer"])
    result["gate_points_per_step_native"] = result["gate_points_per_step_native_mlp"]
    result["gate_points_per_step_hooks"] = result["gate_points_per_step_module_hooks_mlp"]
    finish(chosen, "overhead: time per step, installed and not paused / bare", result)


if __name__ == "__main__":
    main()

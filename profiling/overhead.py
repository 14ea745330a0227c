"""What being pausable costs while nothing is paused.

Arms, interleaved in one process: bare; hydroslurm installed; the incumbent's module hooks. The
ratio of each to bare is the median over the rounds, of the dearer of two models;
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

ARMS = ("installed", "bare_again", "module_hooks")


def measure(training: steps.Training, run_dir: Path, chosen: Namespace) -> dict[str, float]:
    """The ratios of one model."""
    # What must be told apart by one percent is measured alone. Every arm has been installed and
    # uninstalled just before: these touch much memory, and cold caches would count against one arm.
    pair = time_interleaved(
        training.step,
        {
            "bare": lambda: bare(run_dir),
            "installed": lambda: installed(run_dir),
            "again": lambda: bare(run_dir),
        },
        rounds=3 if chosen.quick else 240,
        segment_s=0.01 if chosen.quick else 0.05,
    )
    hooks = time_interleaved(
        training.step,
        {"bare": lambda: bare(run_dir), "module_hooks": lambda: Incumbent(training.model)},
        rounds=2 if chosen.quick else 40,
        segment_s=0.01 if chosen.quick else 0.05,
    )
    return {
        "ratio_installed": median_ratio(pair, "installed", "bare"),
        "ratio_bare_again": median_ratio(pair, "again", "bare"),
        "ratio_module_hooks": median_ratio(hooks, "module_hooks", "bare"),
        "step_us": 1e6 * statistics.median(pair["bare"]),
    }


def main() -> None:
    chosen = options("What being pausable costs while nothing is paused.")
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    trainings = {"mlp": steps.mlp(), "transformer": steps.transformer()}
    with tempfile.TemporaryDirectory() as folder:
        found = {name: measure(one, Path(folder), chosen) for name, one in trainings.items()}
    result = {f"ratio_{arm}": max(of[f"ratio_{arm}"] for of in found.values()) for arm in ARMS}
    for name, of_model in found.items():
        result |= {f"{key}_{name}": value for key, value in of_model.items()}
    finish(chosen, "overhead: time per step, installed and not paused / bare", result)


if __name__ == "__main__":
    main()

"""What being preemptible costs a framework's training, and whether stops cost it a step.

``*_step_ratio``: the median time of a step with the adapter, over that of the bare framework, each
a process of its own, in pairs one after the other; the median over the pairs. Nothing is saved
meanwhile. ``*_again_ratio``: bare over bare, measured in the same way.

``runs_equal`` of ``runs``: scripts that know nothing of hydroslurm, stopped by SIGTERM at random
steps and started again (``hydroslurm prove``), whose steps were all those of the undisturbed run;
``steps_lost``: trained again or never.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

from harness import PROFILING, finish, parser

from hydroslurm.runtime.autoload import PREEMPT_ENV

SCRIPTS = PROFILING.parent / "tests" / "integration" / "scripts"
STOCK = {
    "lightning": ("lightning_digits.py", "--epochs", "2", "--workers", "0"),
    "transformers": ("hf_causal_lm.py", "out", "--epochs", "2"),
}
WARM_UP = 20


def train_lightning(steps: int) -> list[float]:
    """The seconds of each step."""
    import lightning
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(torch)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            del index
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class Clock(lightning.Callback):
        def on_train_batch_start(self, *_: Any, **__: Any) -> None:
            moments.append(time.perf_counter())

    moments: list[float] = []
    logging.getLogger("lightning.pytorch").setLevel("ERROR")
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Clock()],
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(32 * steps, 256)), 32))
    return between(moments)


def train_transformers(steps: int) -> list[float]:
    """The seconds of each step."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(torch)

        def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net(inputs).square().mean()}

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            moments.append(time.perf_counter())

    moments: list[float] = []
    arguments = TrainingArguments(
        output_dir="out", max_steps=steps, per_device_train_batch_size=32, save_strategy="no",
        logging_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    rows = [{"inputs": row} for row in torch.randn(32 * steps, 256)]
    Trainer(Model(), arguments, train_dataset=rows, callbacks=[Clock()]).train()
    return between(moments)


def network(torch: Any) -> Any:
    """A step of a few milliseconds on one core."""
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(256, 256), torch.nn.GELU())]
    return torch.nn.Sequential(*layers)


def between(moments: list[float]) -> list[float]:
    pairs = itertools.pairwise(moments)
    return [later - earlier for earlier, later in pairs][WARM_UP:]


def step_s(framework: str, steps: int, *, preemptible: bool) -> float:
    """The median step of one process."""
    with tempfile.TemporaryDirectory(prefix="hydroslurm-frameworks-") as folder:
        environ = {
            **os.environ,
            PREEMPT_ENV: "requeue" if preemptible else "off",
            "HYDROSLURM_RUN_DIR": f"{folder}/run",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, __file__, "--one", framework, "--steps", str(steps)],
            cwd=folder, env=environ, capture_output=True, text=True, check=True,
        )  # fmt: skip
    return float(json.loads(done.stdout.splitlines()[-1])["step_s"])


def prove(framework: str, *, steps: int, stops: int, seed: int) -> dict[str, Any]:
    """What ``hydroslurm prove`` finds out about a stock script."""
    script, *arguments = STOCK[framework]
    with tempfile.TemporaryDirectory(prefix="hydroslurm-frameworks-") as folder:
        done = subprocess.run(
            [
                sys.executable, "-m", "hydroslurm.cli", "prove", "--json", "--steps", str(steps),
                "--stops", str(stops), "--seed", str(seed), str(SCRIPTS / script), *arguments,
            ],
            cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    made = parser("The cost of being preemptible in Lightning and transformers.")
    made.add_argument("--one", choices=sorted(STOCK), help="only train, and print the step time")
    made.add_argument("--steps", type=int, default=300, help="steps of each process")
    chosen = made.parse_args()
    if chosen.one:
        warnings.filterwarnings("ignore")
        train = {"lightning": train_lightning, "transformers": train_transformers}[chosen.one]
        print(json.dumps({"step_s": statistics.median(train(chosen.steps))}))
        return
    figures: dict[str, Any] = {}
    pairs, steps = (1, 40) if chosen.quick else (9, chosen.steps)
    for framework in STOCK:
        ratios, again = [], []
        for _ in range(pairs):
            bare = step_s(framework, steps, preemptible=False)
            ratios.append(step_s(framework, steps, preemptible=True) / bare)
            again.append(step_s(framework, steps, preemptible=False) / bare)
        figures[f"{framework}_step_ratio"] = statistics.median(ratios)
        figures[f"{framework}_again_ratio"] = statistics.median(again)
        figures[f"{framework}_step_ms"] = 1e3 * bare
    seeds = range(1 if chosen.quick else 3)
    results = [
        prove(framework, steps=12 if chosen.quick else 60, stops=1 if chosen.quick else 6, seed=n)
        for framework in STOCK
        for n in seeds
    ]
    figures["runs"] = len(results)
    figures["runs_equal"] = sum(bool(one["holds"]) for one in results)
    figures["steps_lost"] = sum(
        (one["steps_repeated"] or 0) + (one["steps_left_out"] or 0) for one in results
    )
    finish(chosen, "Frameworks: with the adapter, against bare", figures)


if __name__ == "__main__":
    main()

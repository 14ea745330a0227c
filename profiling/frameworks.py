"""What being preemptible costs a framework's training.

``*_step_ratio``: the median time of a step with the adapter, over that of the bare framework.
Processes of both train at the same time and take turns of some steps, so that what else the machine
does meets both; the median over the turns of several such pairs. Nothing is saved meanwhile.
``*_again_ratio``: bare over bare, measured in the same way.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from harness import PROFILING, finish, options, scratch

# isort: split
from processes import child

from hydroslurm.runtime.autoload import PREEMPT_ENV

TURN = 40
"""Steps until it is another process's turn."""
COLD = 8
"""Steps at the beginning of a turn that are not counted: another process had the caches."""
ARMS = {"bare": "off", "adapter": "requeue", "again": "off"}
WIDTH = 512
"""Of the network's layers. A step takes some 5 ms on one core."""

KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}
"""glibc would give gradients back to the kernel and take them again in each step, or not, as the
heap happens to lie in a process: hundreds of page faults, more than what is to be measured."""


class Turns:
    """Trains when the parent process says so; prints the median seconds of a step of each turn."""

    def __init__(self) -> None:
        self._moments: list[float] = []
        # Where tensors lie in memory makes all steps of a process some per cent quicker or slower,
        # and what was imported decides that: without this, each arm has a place of its own.
        dice = random.SystemRandom()
        self._kept = [
            bytearray(dice.randrange(1 << 9, 1 << 16)) for _ in range(dice.randrange(1 << 8))
        ]

    def step_begins(self) -> None:
        self._moments.append(time.perf_counter())
        if len(self._moments) <= TURN:
            return
        took = [later - earlier for earlier, later in itertools.pairwise(self._moments)]
        print("step_s", statistics.median(took[COLD:]), flush=True)
        sys.stdin.readline()
        self._moments = [time.perf_counter()]


def train_lightning(steps: int) -> None:
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
            turns.step_begins()

    turns = Turns()
    logging.getLogger("lightning.pytorch").setLevel("ERROR")
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Clock()],
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(32 * steps, WIDTH)), 32))


def train_transformers(steps: int) -> None:
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
            turns.step_begins()

    turns = Turns()
    arguments = TrainingArguments(
        output_dir="out", max_steps=steps, per_device_train_batch_size=32, save_strategy="no",
        logging_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    rows = [{"inputs": row} for row in torch.randn(32 * steps, WIDTH)]
    Trainer(Model(), arguments, train_dataset=rows, callbacks=[Clock()]).train()


def network(torch: Any) -> Any:
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
    return torch.nn.Sequential(*layers)


TRAIN = {"lightning": train_lightning, "transformers": train_transformers}


def turns_of(framework: str, steps: int, names: Sequence[str]) -> dict[str, list[float]]:
    """The median step of each turn of each arm, but for the first turn, which warms up.

    Args:
        names: of the arms, in the order of their turns.
    """
    found: dict[str, list[float]] = {name: [] for name in names}
    with scratch("frameworks") as folder, contextlib.ExitStack() as stack:
        trainings = {}
        for name in names:
            own = folder / name
            own.mkdir()
            environ = {
                PREEMPT_ENV: ARMS[name],
                "HYDROSLURM_RUN_DIR": str(own / "run"),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(PROFILING),
                **KEEP_MEMORY,
            }
            code = f"import frameworks\nframeworks.TRAIN[{framework!r}]({steps + 1})"
            trainings[name] = stack.enter_context(child(code, own, environ=environ))
        for turn in range(steps // TURN):
            for name, process in trainings.items():
                if turn:
                    process.say("go")
                took_s = float(process.expect("step_s "))
                if turn:
                    found[name].append(took_s)
    return found


def ratio(pairs: Sequence[Mapping[str, list[float]]], name: str) -> float:
    """Of an arm to bare, the median over the turns of all pairs."""
    both = [(turns[name], turns["bare"]) for turns in pairs]
    return statistics.median(a / b for one, bare in both for a, b in zip(one, bare, strict=True))


def main() -> None:
    chosen = options("The cost of being preemptible in Lightning and transformers.")
    figures: dict[str, Any] = {}
    # many processes tell more than many turns: see Turns
    orders = [*itertools.permutations(ARMS)]
    orders, steps = (orders[:1], 4 * TURN) if chosen.quick else (2 * orders, 5 * TURN)
    for framework in TRAIN:
        pairs = [turns_of(framework, steps, names) for names in orders]
        figures[f"{framework}_step_ratio"] = ratio(pairs, "adapter")
        figures[f"{framework}_again_ratio"] = ratio(pairs, "again")
    finish(chosen, "Frameworks: with the adapter, against bare", figures)


if __name__ == "__main__":
    main()

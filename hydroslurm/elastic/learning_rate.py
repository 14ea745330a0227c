"""A learning rate that follows the size of an elastic run.

Steps of more samples tolerate, and need, a larger learning rate: proportional to the samples for
SGD (Goyal et al. 2017, arXiv:1706.02677), to their square root for Adam (Krizhevsky 2014,
arXiv:1404.5997; Malladi et al. 2022, arXiv:2205.10287). The script's learning rate is meant for the
full size. It is scaled while the optimizer steps and restored after, so schedulers, checkpoints and
the script see only their own numbers. After a change of size the factor moves to its new value in
equal parts over the warm-up steps, while the changed gradient noise does least harm.
"""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer

from hydroslurm.elastic.roster import LearningRate


def factor_of(rule: LearningRate, *, ranks: int, full: int) -> float:
    """Return the factor on the full size's learning rate when ``ranks`` ranks train."""
    if rule == "none":
        return 1.0
    return ranks / full if rule == "linear" else math.sqrt(ranks / full)


class ScaledLearningRate:
    """For the optimizers of one rank; the same on all ranks.

    Attributes:
        factor: of the next step.
    """

    def __init__(self, rule: LearningRate, *, full: int, warmup_steps: int) -> None:
        """``full``: ranks at full size, which the script's learning rate is meant for."""
        self.factor = 1.0
        self._rule: LearningRate = rule
        self._full = full
        self._warmup_steps = warmup_steps
        self._target = 1.0
        self._by_step = 0.0
        self._has_begun = False

    def watch(self, optimizer: Optimizer) -> None:
        """Scale the steps of this optimizer."""
        if self._rule != "none":
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)

    def resize(self, ranks: int) -> None:
        """Note how many ranks train from now on. A process's first size applies at once."""
        self._target = factor_of(self._rule, ranks=ranks, full=self._full)
        if self._warmup_steps == 0 or not self._has_begun:
            self.factor = self._target
        self._by_step = (self._target - self.factor) / max(1, self._warmup_steps)
        self._has_begun = True

    def step(self) -> None:
        """Note that a step is complete."""
        if self.factor != self._target:
            self.factor += self._by_step
            if (self._target - self.factor) * self._by_step <= 0:
                self.factor = self._target

    def state_dict(self) -> dict[str, float]:
        """State a newcomer needs to step as the others do."""
        return {"factor": self.factor}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.factor, self._has_begun = float(state["factor"]), True

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["_unscaled_lr"] = group["lr"]
            group["lr"] = group["lr"] * self.factor

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group.pop("_unscaled_lr")

"""Stock submitit, as its docs/checkpointing.md asks for: a callable with ``checkpoint``, submitted
with its AutoExecutor, that also saves after every epoch."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from digits_job import StockTraining
from digits_training import finished
from observer import Observer


class Training(StockTraining):
    """The training of stock_submitit.py, observed."""

    def __call__(self) -> dict[str, Any]:
        result = super().__call__()
        assert self.parts is not None
        finished(self.parts, self.step)
        return result

    def observed(self) -> AbstractContextManager[Any]:
        return Observer(self.config.folder, self.step)

"""``Run`` in an elastic run: members come and go between two steps, in the same processes.

    model = DistributedDataParallel(model)          # each member builds it alone
    with hydroslurm.Run(model=model, optimizer=optimizer, loader=loader, elastic=True) as run:
        for batch in run.batches(epochs=10):
            ...

Each rank is a run of its own as far as signals, events and saving go; who trains together is the
coordinator's to say (:mod:`hydroslurm.elastic`). The first rank of a generation saves, for all have
the same state. A member that is signalled announces that it leaves, and the others train on.

What one step costs besides: a look at two attributes, and the position and random numbers are
noted, to which a step that could not be completed comes back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hydroslurm.checkpoint.outcome import Saved
from hydroslurm.core.events import EventKind
from hydroslurm.data.global_batches import share_batches
from hydroslurm.errors import UsageError
from hydroslurm.runtime.controller import StopRequest
from hydroslurm.training.generations import Generations


class ElasticRun(Generations):
    """One rank of an elastic run; see :class:`Run`, which makes it for ``elastic=True``."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for thing in self._objects.by_name().values():
            if isinstance(thing, Optimizer):
                self._scaled.watch(thing)
                if self._log is not None:
                    self._log.watch(thing)
        # of all optimizers: one that the run does not know must not step by what is no gradient
        self._unwatch = register_optimizer_step_pre_hook(self._before_optimizer).remove

    def close(self) -> None:
        self._unwatch()
        super().close()

    # --- what differs at the beginning and the end
    # --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until all members have trained to the end; the first of them saves."""
        if not self._has_begun:
            self._begin_unasked("the run is to be finished", may_load=False)
        self._count_step_left_early()
        while not self._is_done:
            directive = self._member.safe_point(self._step, final=True, stop=self._stop_seen)
            assert directive is not None
            self._obey(directive)
        if self._is_first:
            super().finish()
        else:
            self._attempt.record(EventKind.RUN_FINISHED)
            self._leave()

    def _use(self, loader: Any) -> None:
        options = self._elastic_folder.options()
        share_batches(
            loader,
            ranks=self._engine.local_size * options.size.max,
            batch=options.batch,
            in_shards=self._in_order,
        )
        super()._use(loader)

    # --- a fixed order of sums
    # --------------------------------------------------------------------------------------------

    def shards(self, batch: Any) -> Iterator[Any]:
        if self._shard_steps is None:
            yield batch
        else:
            yield from self._shard_steps.shards(batch, self._undo.buffers)

    def _add(self, name: str, thing: Any, *, per_rank: bool = False) -> None:
        super()._add(name, thing, per_rank=per_rank)
        if self._in_order and self._cursor.registered.names():
            raise UsageError(
                f"register({name!r}): what each rank has for itself depends on the number of "
                "ranks, and `summation: fixed_order` promises the same bits for each. Draw from "
                "the global generators, which are the shard's within run.shards(batch)"
            )

    # --- safe points
    # --------------------------------------------------------------------------------------------

    def _complete_step(self) -> None:
        if self._shard_steps is not None:
            self._shard_steps.require_summed("the step ended")
        failed = self._engine.failed
        self._engine.sum.is_sending = False
        self._cursor.count_step()
        if failed:
            self._undo.drop()
        else:
            self._step += 1
            self._scaled.step()
            self._are_equal = not self._average_every
            if self._average_every and self._step % self._average_every == 0:
                self._average()
            self._keep()
            if self._log is not None and self._is_first:
                self._log.completed(
                    self._step, self._epoch, own=self._kept_own, samples=self._samples
                )
                self._log.committed(self._saver.durable_step or 0)
            if self._replicas is not None:
                self._replicas.exchange(self._kept_own)
        self._look_for_stop()
        directive = self._member.safe_point(
            self._step, failed=failed, equal=self._are_equal, stop=self._stop_seen
        )
        if directive is not None:
            self._obey(directive)
        if not failed:
            super().safe_point()

    def _left_of_epoch(self, accumulate: int) -> Iterator[Any]:
        while True:
            self._moved = False
            self._keep()
            for batch in super()._left_of_epoch(accumulate):
                mine, total = self._cursor.share_of_batch()
                self._engine.sum.weight = mine / total
                self._samples = total
                if self._shard_steps is not None:
                    self._shard_steps.hand_out(batch)
                yield batch
            if not self._moved:
                return

    def _arrive(self) -> StopRequest | None:
        self._look_for_stop()
        return None

    def _look_for_stop(self) -> None:
        """A stop that was requested is announced: the others are told, and this rank trains on
        until they hold together."""
        request = self._controller.stop_request
        if request is not None:
            self._member.leave(request.message)

    # --- saving: the first rank does, for all have the same
    # --------------------------------------------------------------------------------------------

    def save(self, *, kind: str = "manual") -> Saved:
        """As of any run, on all ranks: the first one saves, the others return at once.

        In the body of a step that is repeated nothing is saved, for it comes again. With
        ``averaging`` the ranks' weights differ within the loop: the save follows behind the next
        step at which they are averaged, and what is returned says so.
        """
        if not self._has_begun:
            self._begin_unasked("save() was called", may_load=False)
        step = self._completed_step()
        later = ""
        if self._engine.failed:
            later = f"a rank is gone: step {step} is repeated, and saves then"
        elif self._average_every and (not self._are_equal or self._cursor.step_has_begun):
            self._save_is_asked = True
            later = f"it is saved behind the next average, one of every {self._average_every} steps"
        elif self._is_first:
            return super().save(kind=kind)
        reason = later or "the first rank saves for all"
        return Saved(step=step, is_committed=False, checkpoint=None, steps_at_risk=0, reason=reason)

    def _is_due(self) -> bool:
        if not (self._is_first and self._are_equal):
            return False
        asked, self._save_is_asked = self._save_is_asked, False
        return asked or super()._is_due()

    def _save_behind_batches(self, *, since: int) -> None:
        if not self._are_equal:
            self._average()
        if self._is_first:
            super()._save_behind_batches(since=since)
        self._saves.behind_batches = True

    # --- a step that cannot be completed
    # --------------------------------------------------------------------------------------------

    def _before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer without gradients steps nowhere."""
        if self._shard_steps is not None:
            self._shard_steps.require_summed("an optimizer stepped")
        if self._engine.failed:
            self._undo.hold_back(optimizer)

    def _keep(self) -> None:
        """Note where the run is, between two steps."""
        self._kept_own = self._position()
        self._undo.keep()
        now_s = time.monotonic()
        took_s = now_s - self._step_began_s
        self._step_began_s = now_s
        if took_s > 0 and self._samples:
            self._member.note_pace(took_s, self._samples / took_s)

"""``Run`` in an elastic run: members come and go between two steps, in the same processes.

    model = DistributedDataParallel(model)          # each member builds it alone
    with hydroslurm.Run(model=model, optimizer=optimizer, loader=loader, elastic=True) as run:
        for batch in run.batches(epochs=10):
            ...

Each rank is a run of its own as far as signals, events and saving go; who trains together is the
coordinator's to say (:mod:`hydroslurm.elastic`). The first rank of a generation saves, for all have
the same state. A member that is signalled announces that it leaves, and the others train on.

What one step costs besides: a look at two attributes, and what a step that could not be completed
comes back to: the position, random numbers, and the copies of
:class:`~hydroslurm.training.step_undo.StepUndo`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hydroslurm.checkpoint.outcome import Saved
from hydroslurm.checkpoint.plain import plain
from hydroslurm.core.events import EventKind
from hydroslurm.data.global_batches import share_batches
from hydroslurm.elastic.roster import Depart
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
        # of all optimizers: one that the run does not know must not step by what is no gradient
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(lambda *_: self._undo.after_optimizer()),
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().close()

    # --- what differs at the beginning and the end
    # --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until all members have trained to the end; the first of them saves. The default
        group stays that of these members, for what follows."""
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
        self._engine.remain()

    def _others_have_ended(self) -> bool:
        return self._member.done(of_all=True)

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
            yield from self._shard_steps.shards(batch, self._undo.kept_of)

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
        self._engine.sum.is_sending = False
        self._cursor.count_step()
        # a window of accumulated batches is one step here: dropped, held behind and saved as one
        accumulates = self._undo.accumulates()
        failed = self._engine.failed or (accumulates and self._member.broken)
        if failed:
            self._drop_step()
        else:
            self._step += 1
            self._scaled.step()
            self._are_equal = not self._average_every
            if self._average_every and self._step % self._average_every == 0:
                self._average()
            if not accumulates:
                self._undo.completed()
                self._keep()
            if self._replicas is not None:
                self._replicas.exchange(self._kept_own)
        self._look_for_stop()
        if accumulates and not failed:
            return
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
            if not (self._undo.is_kept and self._undo.accumulates()):
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
        else:
            self._undo.before_optimizer()

    def _drop_step(self) -> None:
        """Leave where that cannot be done: whoever starts anew has a state that is right."""
        if not self._undo.drop():
            self._depart(
                Depart(
                    "a rank is gone, and this step cannot be undone: for the first time in this "
                    "process it has summed gradients after an optimizer had stepped, or changed "
                    "weights that were frozen",
                    again=True,
                )
            )
        self._step, self._epoch = self._kept_at

    def _count_step_left_early(self) -> None:
        """One that was dropped counts for nothing, and with its loop left nobody repeats it."""
        if self._engine.failed and self._cursor.step_has_begun:
            self._cursor.count_step()
            self._drop_step()
        super()._count_step_left_early()

    def _one_step(self) -> Iterator[int]:
        if not self._undo.is_kept:
            self._keep()
        yield from super()._one_step()

    def _begin_loop(self, name: str) -> None:
        super()._begin_loop(name)
        self._undo.is_kept = False

    def _keep(self) -> None:
        """Note where the run is, between two steps."""
        own = self._position()
        registered = {"registered": plain(own["registered"])} if "registered" in own else {}
        self._kept_own = {**own, **registered}
        self._kept_at = self._step, self._epoch
        self._undo.keep()
        now_s = time.monotonic()
        took_s = now_s - self._step_began_s
        self._step_began_s = now_s
        if took_s > 0 and self._samples:
            self._member.note_pace(took_s, self._samples / took_s)

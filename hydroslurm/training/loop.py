"""``Loop``: the steps of a loop of the script's own, with a safe point behind each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hydroslurm.checkpoint.store import State
from hydroslurm.errors import UsageError
from hydroslurm.training.checks import Remedies, own_loop
from hydroslurm.training.session import Session

if TYPE_CHECKING:
    from hydroslurm.training.elastic_rank import ElasticRank


class Loop:
    """The loops of one run; its methods are those of :class:`hydroslurm.training.run.Run`.

    Args:
        elastic: the run's members may come and go.
    """

    def __init__(self, session: Session, *, elastic: ElasticRank | None = None) -> None:
        self._session, self._elastic = session, elastic
        self._cursor = session.cursor
        self._is_in_body = False

    def batches(self, *, epochs: int, accumulate: int, check: bool) -> Iterator[Any]:
        """See :meth:`Run.batches`."""
        session, cursor = self._session, self._cursor
        if cursor.position is None:
            raise UsageError("batches() needs a loader; give one to Run(loader=...)")
        if accumulate < 1 or epochs < 0:
            raise UsageError(
                f"batches(epochs={epochs}, accumulate={accumulate}): wanted epochs of 0 or more, "
                "accumulate of 1 or more"
            )
        without = "run.batches(epochs=..., check=False)"
        self._begin("batches", own_loop(without) if check else None)
        first = cursor.step
        while cursor.epoch < epochs:
            session.leave_if_asked()
            yield from self.batches_left(accumulate)
            if cursor.epoch + 1 == epochs:
                session.save_behind_batches(since=first)
            cursor.epoch += 1
            cursor.in_epoch = False
        cursor.restore_rng()  # where there was nothing left to open
        session.contents.script.restore_waiting()
        session.save_behind_batches(since=cursor.step)

    def steps(self, total: int, *, check: bool) -> Iterator[int]:
        """See :meth:`Run.steps`."""
        if not isinstance(total, int) or total < 0:
            raise UsageError(f"steps({total!r}): wanted the number of steps, an int of 0 or more")
        session, cursor = self._session, self._cursor
        self._begin("steps", own_loop("run.steps(total, check=False)") if check else None)
        first = cursor.step
        cursor.begin_steps(left=total - first)
        if first <= total:
            session.contents.script.restore_waiting()
        if first < total:
            session.leave_if_asked()
        while cursor.step < total:
            if self._elastic is not None:
                self._elastic.keep_once()
            cursor.hand_out_step()
            with self._body():
                yield cursor.step
            self._end_step()
        session.save_behind_batches(since=first)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """See :meth:`Run.evaluation`."""
        session, saves = self._session, self._session.saves
        session.require_begun("an evaluation begins")
        if self._is_in_body or saves.evaluation is not None:
            where = (
                "the body of a loop over batches() or steps()"
                if self._is_in_body
                else "another one"
            )
            raise UsageError(
                f"run.evaluation() in {where}: a stop there could not be resumed at this place. "
                "Evaluate behind a loop over run.batches(epochs=run.epoch + 1), one block after "
                "the other; or call only run.check_stop(), after which the rest of the body is "
                "not made up for"
            )
        # the block changes no object, and a state_dict() may gather shards
        saves.evaluation = State({}, session.contents.own_state())
        try:
            session.check_stop()
            yield
        finally:
            saves.evaluation = None

    def batches_left(self, accumulate: int) -> Iterator[Any]:
        """Yield the batches that are left of this epoch; a safe point follows each step."""
        if self._elastic is None:
            return self._until_moved(accumulate)
        return self._elastic.batches_left(lambda: self._until_moved(accumulate))

    def _until_moved(self, accumulate: int) -> Iterator[Any]:
        """As :meth:`batches_left`, until a safe point has put the run elsewhere."""
        for batch in self._cursor.batches(accumulate=accumulate):
            self._session.contents.script.restore_waiting()
            with self._body():
                yield batch
            if self._cursor.step_is_full:
                self._end_step()
                if self._session.moved:
                    return
        if self._cursor.step_has_begun:  # the last step of an epoch may have fewer batches
            self._end_step()

    def _begin(self, name: str, remedies: Remedies | None) -> None:
        """A loop of this name begins; resume, if nobody has.

        Args:
            remedies: for what its first step uses and the run lacks; None: that is not looked for.

        Raises:
            UsageError: within the body of another loop.
        """
        session, saves = self._session, self._session.saves
        if self._is_in_body:
            raise UsageError(
                f"run.{name}() in the body of a loop over run.batches() or run.steps(): both would "
                "count the same steps. Make one loop, or one behind the other"
            )
        saves.behind_batches = saves.unchanged = False
        if not session.has_begun:
            saves.unchanged = session.resume()
        session.contents.gradients.begin()
        session.contents.script.enter_loop()
        session.watch.close()  # it is we who count
        session.count_step_left_early()
        if self._elastic is not None:
            self._elastic.begin_loop()
        session.first_step.remedies = remedies

    @contextlib.contextmanager
    def _body(self) -> Iterator[None]:
        """What the script does with a step, or with one of its batches."""
        self._is_in_body = True
        try:
            with self._session.first_step.watched():
                yield
        finally:
            self._is_in_body = self._session.saves.unchanged = False

    def _end_step(self) -> None:
        self._session.check_first_step()
        if self._elastic is not None:
            self._elastic.complete_step()
            return
        self._cursor.count_step()
        self._session.safe_point()

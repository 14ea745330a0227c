"""One rank of an elastic run: members come and go between two steps, in the same processes.

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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hydroslurm.checkpoint import rng
from hydroslurm.checkpoint.census import copied
from hydroslurm.checkpoint.rng import for_new_rank
from hydroslurm.checkpoint.store import State
from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import ExitForRequeue
from hydroslurm.core.rundir import SUPERVISED_ENV, RunDir
from hydroslurm.data.global_batches import StepShards, shard_key, share_batches
from hydroslurm.elastic.engine import InPlaceEngine, folder_of
from hydroslurm.elastic.group import meeting
from hydroslurm.elastic.learning_rate import ScaledLearningRate
from hydroslurm.elastic.reduction import ShardGradients
from hydroslurm.elastic.roster import Depart, Form
from hydroslurm.elastic.sharded import sharded_modules
from hydroslurm.elastic.transfer import PeerReplicas, hand_over
from hydroslurm.errors import HydroslurmError, UsageError
from hydroslurm.gate.protocol import GateState
from hydroslurm.gate.signals import SignalPlan
from hydroslurm.runtime import install as installation
from hydroslurm.runtime.controller import Controller
from hydroslurm.training.rank_group import notice, warning
from hydroslurm.training.script import names_of
from hydroslurm.training.step_undo import StepUndo

if TYPE_CHECKING:
    from hydroslurm.training.session import Session


class ElasticRank:
    """What an elastic run adds to the :class:`Session` of one of its ranks, which calls this at the
    places where it matters who trains. At a change the rank meets the others of a new generation,
    gets the state or hands it over, saves for all, or departs.

    Args:
        model: of the run.

    Raises:
        UsageError: this process belongs to no elastic run, or the model is sharded.
    """

    def __init__(self, model: Any, environ: Mapping[str, str]) -> None:
        self._folder = folder_of(environ)
        if sharded_modules([model]):
            raise UsageError(
                "this model is sharded (fully_shard), and a Run that changes its size in place has "
                "one rank save for all: say `elastic: {engine: restart}` in the job spec, which "
                "saves and starts the ranks again, or use hydroslurm.elastic.State, which shards "
                "within a member, replicates over members, and saves nothing by itself"
            )
        self._engine = InPlaceEngine(
            environ,
            things=[model],
            warn=warning,
            stop=self._is_stop_wanted,
            meet=self._meet,
            resume=self._resume,
            save=self._save_for_all,
            leave=self._depart,
        )
        self._member = self._engine.member
        self._is_replaced = bool(environ.get(SUPERVISED_ENV))
        self._rank = -1  # in the generation
        self._attempt_number = self._began_step = 0
        self._kept_own: Mapping[str, Any] = {}
        self._step_began_s = 0.0
        self._samples = 0
        options = self._options = self._folder.options()
        self._in_order = options.summation == "fixed_order"
        self._shard_steps = ShardSteps(self._engine) if self._in_order else None
        self._average_every = options.averaging_every
        self._engine.sum.averages = bool(options.averaging_every)
        self._save_is_asked = False
        self._are_equal = True
        self._counted_twice = ""
        needs_replicas = options.size.spares and not self._in_order
        self._replicas = PeerReplicas(tell=notice) if needs_replicas else None
        self._scaled = ScaledLearningRate(
            options.lr,
            full=self._engine.local_size * options.size.max,
            warmup_steps=options.lr_warmup_steps,
        )

    # --- the beginning and the end
    # --------------------------------------------------------------------------------------------

    @property
    def run_folder(self) -> Path:
        """Where the run keeps its checkpoints, unless the script says."""
        return self._folder.run

    @property
    def generation(self) -> int:
        """How often the members of this run have changed, from 1."""
        return self._member.generation

    @property
    def is_first(self) -> bool:
        """Whether this rank saves for all."""
        return self._rank == 0

    def install(self, environ: Mapping[str, str]) -> tuple[Controller, bool]:
        """The controller of this process, and whether it was installed for this run.

        Signals and events are this rank's alone; it has a folder of its own for these. A suspend is
        a leave: the others would wait for a rank that is parked."""
        before = installation.controller() if installation.is_installed() else None
        if before is not None and not installation.gives_way():
            return before, False
        name = self._engine.name.replace("/", "_").replace(":", "_")
        folder = self._folder.root / "members" / f"{name}-{self._engine.local_rank}"
        RunDir(folder).claim()
        signals = SignalPlan(suspend_stops=True)
        made = installation.install(run_dir=folder, signals=signals, alone=True, environ=environ)
        return made, made is not before

    def join(self, session: Session) -> None:
        """The session is made; it has all objects that were given to it."""
        self._session, self._cursor, self._contents = session, session.cursor, session.contents
        self._undo = StepUndo(self._contents.objects, self._engine.sum)
        self._engine.is_paused = lambda: session.controller.state is not GateState.RUNNING
        for thing in self._contents.objects.by_name().values():
            if isinstance(thing, Optimizer):
                self._scaled.watch(thing)
        # of all optimizers: one that the run does not know must not step by what is no gradient
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(lambda *_: self._undo.after_optimizer()),
        ]

    def begin(self, *, may_load: bool, seen: str) -> bool:
        """Meet the others, and resume or get the state; see :meth:`Session.claim`."""
        session = self._session
        self._may_load, self._seen = may_load, seen
        self._engine.begin()
        if self._engine.is_done:
            notice("this run has finished; nothing to do")
            session.close()
            self._engine.close()
            raise ExitForRequeue.finished()
        session.has_begun = True
        return self._cursor.step > 0

    def close(self) -> None:
        """No hook stays behind; unless the run is done, this rank leaves the group."""
        for hook in self._hooks:
            hook.remove()
        if not self._engine.is_done:
            self._engine.close()

    def wait_for_finish(self) -> None:
        """Wait until all members have trained to the end. The default group stays that of these
        members, for what follows."""
        self._session.count_step_left_early()
        while not self._engine.is_done:
            self._engine.safe_point(self._cursor.step, final=True)

    def remain(self) -> None:
        """This rank is done, and keeps what its process needs until it ends."""
        self._engine.remain()

    def all_are_done(self) -> bool:
        """Asked as this process ends: whether the others have ended well."""
        return self._member.done(of_all=True)

    def share_batches(self, loader: Any) -> None:
        """Have the ranks share the batches of this loader."""
        share_batches(
            loader,
            ranks=self._engine.local_size * self._options.size.max,
            batch=self._options.batch,
            in_shards=self._in_order,
        )

    def require_no_order(self, name: str) -> None:
        """
        Raises:
            UsageError: this is a state of each rank's own, and sums have a fixed order.
        """
        if self._in_order:
            raise UsageError(
                f"register({name!r}): what each rank has for itself depends on the number of "
                "ranks, and `summation: fixed_order` promises the same bits for each. Draw from "
                "the global generators, which are the shard's within run.shards(batch)"
            )

    # --- directives; see InPlaceEngine
    # --------------------------------------------------------------------------------------------

    def _average(self) -> None:
        """Make the weights equal. If a rank is gone, all find out at the next step, which is
        dropped, and average when they meet again: this step is complete on each of them."""
        try:
            self._engine.average()
            self._are_equal = True
            if self._undo.is_kept:
                self._undo.keep()
        except (RuntimeError, ValueError) as error:
            step = self._cursor.step
            warning(f"step {step}: the weights are not averaged, for a rank is gone: {error}")

    def _meet(self, form: Form) -> int:
        self._began_step = self._cursor.step
        if self._replicas is not None:
            self._replicas.settle(form)
        self._engine.group.form(form)
        self._rank = form.rank
        session = self._session
        if form.fresh and form.rank == form.source and not session.has_begun:
            session.claim(may_load=self._may_load, seen=self._seen)
            self._attempt_number = session.attempt.number or 0
            self._kept_own = self._contents.position()
        if self._average_every and not form.fresh:
            with meeting():
                self._engine.average(without=form.needs, rank=form.rank)
        self._share_state(form)
        if self._replicas is not None:
            with meeting():
                self._replicas.begin(form, self._kept_own)
        self._take_first(form)
        self._engine.prepare(form)
        self._are_equal = True
        if self._shard_steps is not None:
            self._shard_steps.begin_generation()
        self._scaled.resize(form.world_size)
        self._step_began_s = time.monotonic()
        return self._cursor.step

    def _share_state(self, form: Form) -> None:
        """Whoever needs the state has it from the rank that has it; the others go on with theirs,
        as it was behind their last step."""
        state = self._to_hand_over() if form.rank == form.source else None
        with meeting():
            got = hand_over(state, source=form.source, needs=form.needs, rank=form.rank)
            former = self._replicas.hand_over(form) if self._replicas is not None else None
        if got is not None:
            self._take(got, form, former)
        else:
            self._cursor.load(self._kept_own)

    def _resume(self, form: Form) -> None:
        self._session.moved, self._undo.is_kept = True, False
        self._session.attempt.record(
            EventKind.GENERATION,
            generation=form.generation,
            of_rank=form.rank,
            world_size=form.world_size,
            cause=form.cause,
            step=self._cursor.step,
            pause_s=time.monotonic() - form.since_s,
        )
        if form.rank == 0:
            step = self._cursor.step
            steps = "" if step == self._began_step else f", {step} steps done"
            notice(
                f"generation {form.generation}: {form.members} members, {form.world_size} ranks"
                f"{steps} ({form.cause})"
            )

    def _to_hand_over(self) -> Mapping[str, Any]:
        return {
            "shared": self._contents.objects.states(),
            "own": self._contents.with_script(self._kept_own),
            "attempt": self._attempt_number,
            "learning_rate": self._scaled.state_dict(),
        }

    def _take(self, state: Mapping[str, Any], form: Form, former: Mapping[str, Any] | None) -> None:
        """Become as the source is; random numbers are those of the former rank of this number, if
        its state at this step was kept, else this rank's own."""
        own = dict(state["own"])
        if self._in_order:
            pass  # outside of shards all ranks draw the same
        elif former is not None and former["counters"] == own["counters"]:
            own = {**former, "script": own.get("script", {})}
        else:
            own |= {"rng": for_new_rank(own["rng"], form.rank), "new_rank": form.rank}
            if self._replicas is not None and not form.fresh:
                notice(f"rank {form.rank} is new, and begins random numbers of its own")
        self._attempt_number = int(state["attempt"])
        if not form.fresh:
            self._scaled.load_state_dict(dict(state["learning_rate"]))
        source = f"the state of rank {form.source}"
        self._contents.restore(State(shared=dict(state["shared"]), own=own), source=source)
        self._kept_own = own

    def _take_first(self, form: Form) -> None:
        """The first rank writes the run's folder from here on."""
        session = self._session
        if form.rank == 0 and session.attempt.number is None:
            session.fence.hold(session.fence.claim())
            session.store.revoke_others()
            session.attempt.number = self._attempt_number
            session.saves.restart_clock()

    def _save_for_all(self) -> None:
        """Too few members can go on: save before they go."""
        session = self._session
        step = self._cursor.step
        try:
            if not self.is_first:
                session.fence.hold(session.fence.claim())
                session.store.revoke_others()
            self._cursor.load(self._kept_own)
            own = self._contents.with_script(self._kept_own)
            self._cursor.drop_step()
            state = State(shared=self._contents.objects.states(), own=own)
            session.saver.save(state, kind="stop", **session.saves.place())
            warning(f"too few members can go on; step {step} is saved")
        except HydroslurmError as error:
            warning(f"too few members can go on, and step {step} could not be saved: {error}")

    def _depart(self, depart: Depart) -> NoReturn:
        """The others go on without this rank."""
        self._engine.group.destroy()
        step, reason = self._cursor.step, depart.reason or "asked to leave"
        if depart.failed:
            warning(f"this member ends behind step {step}: {reason}")
            leaving = ExitForRequeue(depart.exit_status())
        elif self._is_stop_wanted():
            leaving = self._session.stopping.leave_to_others(
                f"this member leaves behind step {step}, which the others have",
                is_replaced=self._is_replaced,
            )
        else:
            notice(f"this member leaves behind step {step}: {reason}")
            leaving = ExitForRequeue(depart.exit_status())
        self._member.close()
        raise leaving

    # --- a fixed order of sums
    # --------------------------------------------------------------------------------------------

    def shards(self, batch: Any) -> Iterator[Any]:
        """See :meth:`Run.shards`."""
        if self._shard_steps is None:
            yield batch
        else:
            yield from self._shard_steps.shards(batch, self._undo.kept_of)

    # --- safe points
    # --------------------------------------------------------------------------------------------

    def begin_loop(self) -> None:
        """A loop of the script begins."""
        self._undo.is_kept = False

    def keep_once(self) -> None:
        """Note where the run is, if that was not done since the last step."""
        if not self._undo.is_kept:
            self._keep()

    def batches_left(self, until_moved: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """See :meth:`Loop.batches_left`; also of the shares that this rank gets later."""
        session = self._session
        while True:
            session.moved = False
            if not (self._undo.is_kept and self._undo.accumulates()):
                self._keep()
            for batch in until_moved():
                mine, total = self._cursor.share_of_batch()
                self._engine.sum.weight = mine / total
                self._samples = total
                if self._shard_steps is not None:
                    self._shard_steps.hand_out(batch)
                yield batch
            if not session.moved:
                return

    def complete_step(self) -> None:
        """A step is trained, or a rank is gone and it is dropped; then the members may change."""
        session = self._session
        if self._shard_steps is not None:
            self._shard_steps.require_summed("the step ended")
        self._engine.sum.is_sending = False
        self._cursor.drop_step()
        # a window of accumulated batches is one step here: dropped, held behind and saved as one
        accumulates = self._undo.accumulates()
        failed = self._engine.failed or (accumulates and self._member.broken)
        if failed:
            self._drop_step()
        else:
            self._cursor.step += 1
            self._scaled.step()
            self._are_equal = not self._average_every
            if self._average_every and self._cursor.step % self._average_every == 0:
                self._average()
            if not accumulates:
                self._undo.completed()
                self._keep()
            if self._replicas is not None:
                self._replicas.exchange(self._kept_own)
        self.announce_stop()
        if accumulates and not failed:
            return
        average = None if self._are_equal else self._average
        self._engine.safe_point(self._cursor.step, average=average, failed=failed)
        if not failed:
            session.safe_point()

    def announce_stop(self) -> None:
        """A stop that was requested is announced: the others are told, and this rank trains on
        until they hold together."""
        request = self._session.controller.stop_request
        if request is not None:
            self._member.leave(request.message)

    def _is_stop_wanted(self) -> bool:
        return self._session.controller.stop_request is not None

    # --- saving: the first rank does, for all have the same
    # --------------------------------------------------------------------------------------------

    def defers_save(self, step: int) -> str:
        """Why this rank does not save now; "" if it does.

        In the body of a step that is repeated nothing is saved, for it comes again. With
        ``averaging`` the ranks' weights differ within the loop: the save follows behind the next
        step at which they are averaged.
        """
        if self._engine.failed:
            return f"a rank is gone: step {step} is repeated, and saves then"
        if self._average_every and (not self._are_equal or self._cursor.step_has_begun):
            self._save_is_asked = True
            return f"it is saved behind the next average, one of every {self._average_every} steps"
        return "" if self.is_first else "the first rank saves for all"

    def takes_save(self) -> bool | None:
        """Whether to save behind this step; None: that is for the first rank's clock to say."""
        if not (self.is_first and self._are_equal):
            return False
        asked, self._save_is_asked = self._save_is_asked, False
        return asked or None

    def saves_behind_batches(self) -> bool:
        """Whether this rank saves the state behind the last batch, which all make equal."""
        if not self._are_equal:
            self._average()
        return self.is_first

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
        counters = self._kept_own["counters"]
        self._cursor.step, self._cursor.epoch = counters["step"], counters["epoch"]
        changed = self._contents.script.state_dict()
        names = names_of(changed, without=self._contents.objects.by_name())
        if names and names != self._counted_twice:
            self._counted_twice = names
            warning(
                f"step {self._cursor.step} is trained again, and what it has changed in objects "
                f"and variables of the script is not taken back: it may count twice in {names}. "
                "What has a state_dict() and is given to run.register(name, object) is taken back"
            )

    def drop_step_left(self) -> None:
        """A step that was dropped counts for nothing, and with its loop left nobody repeats it."""
        if self._engine.failed and self._cursor.step_has_begun:
            self._cursor.drop_step()
            self._drop_step()

    def _keep(self) -> None:
        """Note where the run is, between two steps."""
        own = self._contents.position()
        registered = {"registered": copied(own["registered"])} if "registered" in own else {}
        self._kept_own = {**own, **registered}
        self._undo.keep()
        now_s = time.monotonic()
        took_s = now_s - self._step_began_s
        self._step_began_s = now_s
        if took_s > 0 and self._samples:
            self._member.note_pace(took_s, self._samples / took_s)


# --- steps shard by shard
# ------------------------------------------------------------------------------------------------

KeptOf = Callable[[torch.nn.Module, str], Any]


class ShardSteps:
    """Of one rank."""

    def __init__(self, engine: InPlaceEngine) -> None:
        engine.shares_buffers = False  # ranks have a forward for each of their shards
        self._engine = engine
        self._unsummed: object = None
        self._are_buffers_checked = False

    def begin_generation(self) -> None:
        """The ranks have met."""
        self._are_buffers_checked = False

    def hand_out(self, batch: object) -> None:
        """The script gets this batch next."""
        self.require_summed("the next batch was fetched")
        self._unsummed = batch

    def require_summed(self, what: str) -> None:
        """
        Raises:
            UsageError: the script has left shards of its step out, and now ``what`` happened.
        """
        if self._unsummed is not None:
            raise UsageError(
                f"{what} before all shards of its step were trained. With `summation: fixed_order` "
                "write `for x, y in run.shards(batch): loss_of(model(x), y).backward()`, to its "
                "end, and the optimizer's step behind it"
            )

    def shards(self, batch: object, kept_of: KeptOf) -> Iterator[Any]:
        """Yield this rank's shards, each to have its forward and backward; then sum.

        Args:
            kept_of: what a module's buffer held before the step.

        Raises:
            UsageError: that is no batch of the run; the forward has changed a buffer.
        """
        if not isinstance(batch, StepShards):
            raise UsageError(
                f"run.shards({type(batch).__name__}): wanted what run.batches() has yielded"
            )
        gradients = ShardGradients(self._engine.modules)
        for one in batch.shards:
            key = shard_key("step", batch.epoch, batch.consumed, one.number, batch.passes)
            with gradients.shard(one.samples / batch.samples), rng.seeded(key):
                yield one.batch
        if not self._are_buffers_checked:
            self._require_same(kept_of)
            self._are_buffers_checked = True
        batch.passes += 1
        self._engine.sum.sum_shards(gradients, batch.count)
        self._unsummed = None

    def _require_same(self, kept_of: KeptOf) -> None:
        buffers = [
            (prefix, module, name, buffer)
            for each in self._engine.modules
            for prefix, module in each.module.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        for prefix, module, name, buffer in buffers:
            if not torch.equal(buffer, kept_of(module, name)):
                path = f"{prefix}.{name}" if prefix else name
                raise UsageError(
                    f"the forward has changed the buffer {path!r}, and with `summation: "
                    "fixed_order` nothing may follow from which shards a rank has had. BatchNorm's "
                    "running statistics do: use GroupNorm or LayerNorm, "
                    "track_running_stats=False, or freeze it with .eval(); or leave summation out"
                )

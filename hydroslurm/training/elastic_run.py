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

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hydroslurm.checkpoint import rng
from hydroslurm.checkpoint.forms import copied
from hydroslurm.checkpoint.outcome import Saved
from hydroslurm.checkpoint.rng import for_new_rank
from hydroslurm.checkpoint.store import State
from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import FAILED, RUN_AGAIN, ExitForRequeue
from hydroslurm.core.rundir import SUPERVISED_ENV, RunDir
from hydroslurm.data.global_batches import StepShards, shard_key, share_batches
from hydroslurm.elastic.engine import InPlaceEngine, folder_of
from hydroslurm.elastic.fixed_order import ShardGradients
from hydroslurm.elastic.group import meeting
from hydroslurm.elastic.learning_rate import ScaledLearningRate
from hydroslurm.elastic.replica import PeerReplicas
from hydroslurm.elastic.roster import Average, Depart, Directive, Finished, Form, Save
from hydroslurm.elastic.sharded import sharded_modules
from hydroslurm.elastic.transfer import hand_over
from hydroslurm.errors import HydroslurmError, RanksError, UsageError
from hydroslurm.gate.protocol import GateState
from hydroslurm.gate.signals import SignalPlan
from hydroslurm.runtime import install as installation
from hydroslurm.runtime.controller import Controller, StopRequest
from hydroslurm.training.contents import names_of
from hydroslurm.training.reporting import notice, warning
from hydroslurm.training.run import Run
from hydroslurm.training.step_undo import StepUndo


class ElasticRun(Run):
    """One rank of an elastic run; see :class:`Run`, which makes it for ``elastic=True``.

    At a change it meets the others of a new generation, gets the state or hands it over, saves for
    all, or departs.
    """

    _is_elastic = True

    def __init__(self, **arguments: Any) -> None:
        environ = arguments.get("environ") or os.environ
        self._elastic_folder = folder_of(environ)
        if sharded_modules([arguments.get("model")]):
            raise UsageError(
                "this model is sharded (fully_shard), and a Run that changes its size in place has "
                "one rank save for all: say `elastic: {engine: restart}` in the job spec, which "
                "saves and starts the ranks anew, or use hydroslurm.elastic.State, which shards "
                "within a member, replicates over members, and saves nothing by itself"
            )
        self._engine = InPlaceEngine(environ, things=[arguments.get("model")], warn=warning)
        self._member = self._engine.member
        self._is_replaced = bool(environ.get(SUPERVISED_ENV))
        if arguments.get("directory") is None:
            arguments["directory"] = self._elastic_folder.run
        self._generation_rank = -1
        self._attempt_number = 0
        self._is_done = False
        self._kept_own: Mapping[str, Any] = {}
        self._kept_at = (0, 0)  # step and epoch
        self._step_began_s = 0.0
        self._samples = 0
        options = self._elastic_folder.options()
        self._in_order = options.summation == "fixed_order"
        self._shard_steps = ShardSteps(self._engine) if self._in_order else None
        self._average_every = options.averaging_every
        self._engine.sum.averages = bool(options.averaging_every)
        self._save_is_asked = False
        self._are_equal = True
        self._counted_twice = ""
        super().__init__(**arguments)
        self._undo = StepUndo(self._objects, self._engine.sum)
        self._engine.is_paused = lambda: self._controller.state is not GateState.RUNNING
        needs_replicas = options.size.spares and not self._in_order
        self._replicas = PeerReplicas(tell=notice) if needs_replicas else None
        self._scaled = ScaledLearningRate(
            options.lr,
            full=self._engine.local_size * options.size.max,
            warmup_steps=options.lr_warmup_steps,
        )
        for thing in self._objects.by_name().values():
            if isinstance(thing, Optimizer):
                self._scaled.watch(thing)
        # of all optimizers: one that the run does not know must not step by what is no gradient
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(lambda *_: self._undo.after_optimizer()),
        ]

    @property
    def generation(self) -> int:
        """How often the members of this run have changed, from 1."""
        return self._member.generation

    # --- the beginning and the end
    # --------------------------------------------------------------------------------------------

    def _install(self, environ: Mapping[str, str]) -> tuple[Controller, bool]:
        """Signals and events are this rank's alone; it has a folder of its own for these. A suspend
        is a leave: the others would wait for a rank that is parked."""
        if installation.is_installed() and not installation.gives_way():
            return installation.controller(), False
        name = self._engine.name.replace("/", "_").replace(":", "_")
        folder = self._elastic_folder.root / "members" / f"{name}-{self._engine.local_rank}"
        RunDir(folder).claim()
        signals = SignalPlan(suspend_stops=True)
        made = installation.install(run_dir=folder, signals=signals, alone=True, environ=environ)
        return made, True

    def _begin(self, *, may_load: bool, seen: str) -> bool:
        self._remember_script()
        self._member.start()
        directive = self._member.begin(stop=self._stop_seen)
        self._may_load, self._seen = may_load, seen
        self._obey(directive)
        if self._is_done:
            notice("this run has finished; nothing to do")
            self.close()
            self._engine.close()
            raise ExitForRequeue.finished()
        self._has_begun = True
        return self._step > 0

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().close()
        if not self._is_done:
            self._engine.close()

    def finish(self) -> None:
        """Wait until all members have trained to the end; the first of them saves. The default
        group stays that of these members, for what follows."""
        self._require_begun("the run is to be finished", may_load=False)
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

    # --- directives
    # --------------------------------------------------------------------------------------------

    def _obey(self, directive: Directive) -> None:
        """Do what the coordinator says, until this rank trains again, or ends."""
        while True:
            if isinstance(directive, Form):
                if self._meet(directive):
                    return
            elif isinstance(directive, Save):
                self._save_for_all()
                self._member.saved(directive)
            elif isinstance(directive, Average):
                # now, and not at the next multiple: a suspend leaves two seconds
                self._average()
                after = self._member.safe_point(self._step, stop=self._stop_seen)
                if after is None:
                    return
                directive = after
                continue
            elif isinstance(directive, Finished):
                self._is_done = True
                return
            else:
                self._depart(directive)
            directive = self._member.again(stop=self._stop_seen)

    def _average(self) -> None:
        """Make the weights equal. If a rank is gone, all find out at the next step, which is
        dropped, and average when they meet again: this step is complete on each of them."""
        try:
            self._engine.average()
            self._are_equal = True
            if self._undo.is_kept:
                self._undo.keep()
        except (RuntimeError, ValueError) as error:
            warning(f"step {self._step}: the weights are not averaged, for a rank is gone: {error}")

    def _meet(self, form: Form) -> bool:
        """Form a generation; whether it was formed."""
        began_step = self._step
        try:
            self._form(form)
        except RanksError as error:
            self._engine.group.destroy()
            warning(f"generation {form.generation} is not formed: {error}")
            self._member.formed(form, ok=False, error=str(error))
            return False
        self._member.formed(form, ok=True, step=self._step)
        self._moved, self._undo.is_kept = True, False
        self._tell_generation(form, began_step)
        return True

    def _form(self, form: Form) -> None:
        """Meet the others, get the state or give it, and have everything set upon the new ranks.

        Raises:
            RanksError: the others cannot be reached, or one has sent what cannot be used.
        """
        if self._replicas is not None:
            self._replicas.settle(form)
        self._engine.group.form(form)
        self._generation_rank = form.rank
        if form.fresh and form.rank == form.source and not self._has_begun:
            super()._begin(may_load=self._may_load, seen=self._seen)
            self._attempt_number = self._attempt.number or 0
            self._kept_own = self._position()
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

    def _tell_generation(self, form: Form, began_step: int) -> None:
        self._attempt.record(
            EventKind.GENERATION,
            generation=form.generation,
            of_rank=form.rank,
            world_size=form.world_size,
            cause=form.cause,
            step=self._step,
            pause_s=time.monotonic() - form.since_s,
        )
        if form.rank == 0:
            steps = "" if self._step == began_step else f", {self._step} steps done"
            notice(
                f"generation {form.generation}: {form.members} members, {form.world_size} ranks"
                f"{steps} ({form.cause})"
            )

    def _to_hand_over(self) -> Mapping[str, Any]:
        return {
            "shared": self._objects.states(),
            "own": self._with_script(self._kept_own),
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
        self._apply(State(shared=dict(state["shared"]), own=own), source=source)
        self._kept_own = own

    def _take_first(self, form: Form) -> None:
        """The first rank writes the run's folder from here on."""
        if form.rank == 0 and self._attempt.number is None:
            self._fence.hold(self._fence.claim())
            self._store.revoke_others()
            self._attempt.number = self._attempt_number
            self._last_save_s = time.monotonic()

    def _save_for_all(self) -> None:
        """Too few members can go on: save before they go."""
        try:
            if not self._is_first:
                self._fence.hold(self._fence.claim())
                self._store.revoke_others()
            self._cursor.load(self._kept_own)
            self._saver.save(
                State(shared=self._objects.states(), own=self._with_script(self._kept_own)),
                step=self._step,
                epoch=self._epoch,
                kind="stop",
                meta=self._made_of(),
            )
            warning(f"too few members can go on; step {self._step} is saved")
        except HydroslurmError as error:
            warning(f"too few members can go on, and step {self._step} could not be saved: {error}")

    def _depart(self, depart: Depart) -> NoReturn:
        """The others go on without this rank."""
        self._engine.group.destroy()
        reason = depart.reason or "asked to leave"
        if depart.failed:
            warning(f"this member ends behind step {self._step}: {reason}")
            leaving = ExitForRequeue(FAILED)
        elif self._controller.stop_request is not None:
            leaving = self._stopping.leave_to_others(
                f"this member leaves behind step {self._step}, which the others have",
                is_replaced=self._is_replaced,
            )
        else:
            notice(f"this member leaves behind step {self._step}: {reason}")
            leaving = ExitForRequeue(RUN_AGAIN if depart.again else 0)
        self._member.close()
        raise leaving

    def _stop_seen(self) -> bool:
        return self._controller.stop_request is not None

    @property
    def _is_first(self) -> bool:
        return self._generation_rank == 0

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
        self._require_begun("save() was called", may_load=False)
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
        names = names_of(self._contents.state(), without=self._objects.by_name())
        if names and names != self._counted_twice:
            self._counted_twice = names
            warning(
                f"step {self._step} is trained again, and what it has changed in objects and "
                f"variables of the script is not taken back: it may count twice in {names}. What "
                "has a state_dict() and is given to run.register(name, object) is taken back"
            )

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
        registered = {"registered": copied(own["registered"])} if "registered" in own else {}
        self._kept_own = {**own, **registered}
        self._kept_at = self._step, self._epoch
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

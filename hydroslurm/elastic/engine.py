"""The in-place engine: one rank obeys the coordinator, between two steps of one process.

It has the rank's member, process group and gradient sum. What is trained has its owner: the rank of
a :class:`hydroslurm.Run`, or a :class:`~hydroslurm.elastic.state.State` in Horovod's form.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hydroslurm.core.exitcodes import at_end, end_process
from hydroslurm.core.rundir import ELASTIC_ENV, GENERATION_ENV
from hydroslurm.elastic.folder import ElasticFolder, member_name
from hydroslurm.elastic.group import GenerationGroup, backend_of_script, parallel_modules, rebuild
from hydroslurm.elastic.member import Member
from hydroslurm.elastic.reduction import GradientSum, sum_bucket
from hydroslurm.elastic.roster import Average, Depart, Directive, Finished, Form
from hydroslurm.elastic.sharded import Shards, sharded_modules
from hydroslurm.errors import RanksError, UsageError

LEAVE_S = 20.0
"""How long a training thread has to react once the others have gone on without it."""


class InPlaceEngine:
    """Changes the size between two steps, within the same process.

    Attributes:
        is_done: all have trained to the end.
        is_paused: whether this rank is paused on purpose; the others must not give it up.
        shares_buffers: a forward starts from rank 0's buffers; all ranks have equally many.
        failed: a collective of the current step failed; its gradients are invalid.
        shards: of a model that each member shards over its ranks; otherwise None.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        things: Iterable[Any],
        warn: Callable[[str], None],
        stop: Callable[[], bool],
        meet: Callable[[Form], int],
        resume: Callable[[Form], None],
        save: Callable[[], None],
        leave: Callable[[Depart], NoReturn],
    ) -> None:
        """
        Args:
            things: objects in or around which a DistributedDataParallel is, or models of
                ``fully_shard``.
            stop: whether this rank has been asked to stop, and is to leave the others.
            meet: meets the others of a generation, gives or gets the state, and prepares to train;
                returns the step after which all train on. A RanksError: the others cannot be
                reached, or one has sent something unusable.
            resume: trains on in the generation that has met.
            save: saves, if that is possible: too few members can go on.
            leave: ends, as the others go on without this rank.

        Raises:
            UsageError: this process has no elastic run, its run restarts ranks, or its model is
                sharded over other ranks than those of its member.
        """
        things = list(things)
        self.folder = folder_of(environ)
        if self.folder.options().engine == "restart":
            raise UsageError(
                "elastic.engine: restart starts ranks again below `hydroslurm agent`, and this one "
                "was started otherwise"
            )
        self.name = member_name(environ)
        self.local_rank = int(environ.get("LOCAL_RANK", 0) or 0)
        self.local_size = int(environ.get("LOCAL_WORLD_SIZE", 1) or 1)
        self.failed = self.is_done = False
        self._warn = warn
        self._meet, self._resume, self._save, self._leave = meet, resume, save, leave
        self.is_paused: Callable[[], bool] = lambda: False
        self.modules = parallel_modules(things)
        sharded = sharded_modules(things)
        self.shards = Shards(sharded, local_size=self.local_size) if sharded else None
        self.member = Member(
            self.folder,
            name=self.name,
            local_rank=self.local_rank,
            local_size=self.local_size,
            node=environ.get("SLURMD_NODENAME", ""),
            on_abort=self._abort,
            stop=stop,
            waits=lambda: self.sum.is_sending,
            is_paused=lambda: self.is_paused(),
            warn=warn,
        )
        self.group = GenerationGroup(self.member, backend=backend_of_script(), shards=self.shards)
        self.sum = GradientSum(
            lambda: self.group.group,
            may_send=lambda: not (self.failed or self.member.broken),
            on_error=self._on_error,
        )
        if self.shards is not None:
            self.shards.sum_by(lambda shard: self.sum.average_shard(shard, self.group.replicas))
        self.shares_buffers = True
        self._watched: list[DistributedDataParallel] = []

    # --- what the coordinator says

    def begin(self) -> None:
        """Join the run, and wait until this rank trains, or the run is done."""
        self.member.start()
        self._obey(self.member.begin())

    def safe_point(
        self, step: int, *, average: Callable[[], None] | None = None, **how: bool
    ) -> bool:
        """Let the members change after this step, and return whether they did.

        Args:
            average: makes this rank's weights equal to the others', if they are not.
            how: as for :meth:`Member.safe_point`.
        """
        directive = self.member.safe_point(step, equal=average is None, **how)
        if isinstance(directive, Average):
            assert average is not None
            average()  # now, and not at the next multiple: a suspend leaves two seconds
            directive = self.member.safe_point(step)
        if directive is None or isinstance(directive, Average):
            return False
        self._obey(directive)
        return True

    def _obey(self, directive: Directive) -> None:
        """Do what the coordinator says, until this rank trains, or is done."""
        while True:
            if isinstance(directive, Form):
                if self._has_met(directive):
                    return
            elif isinstance(directive, Finished):
                self.is_done = True
                return
            elif isinstance(directive, Depart):
                self._leave(directive)
            else:
                self._save()
                self.member.saved(directive)
            directive = self.member.again()

    def _has_met(self, form: Form) -> bool:
        try:
            step = self._meet(form)
        except RanksError as error:
            self.group.destroy()
            self._warn(f"generation {form.generation} is not formed: {error}")
            self.member.formed(form, ok=False, error=str(error))
            return False
        self.member.formed(form, ok=True, step=step)
        self._resume(form)
        return True

    # --- what is trained together

    def prepare(self, form: Form) -> None:
        """Set up all that depends on who trains, once the generation has met.

        Raises:
            UsageError: several ranks train, and nothing sums their gradients.
        """
        if form.world_size > 1 and not self.modules and self.shards is None:
            raise UsageError(
                "several ranks train together, and no DistributedDataParallel was given to sum "
                "their gradients: model = DistributedDataParallel(model), and give that"
            )
        for module in self.modules:
            rebuild(module, sum_bucket, self.sum)
            if module.broadcast_buffers and module not in self._watched:
                self._watched.append(module)
                module.register_forward_pre_hook(self._before_forward)
        self.sum.begin_generation([p for module in self.modules for p in module.parameters()])
        self.sum.weight = 1.0 / form.world_size  # until a caller sets it from the ranks' samples
        self.failed = False

    def agree(self, *, limit_s: float | None = None) -> bool:
        """Return whether the generation is broken; call between two steps. If each member shards
        its model, all its ranks call this, agree, and drop the step if one of them does.

        Raises:
            RuntimeError: a rank of this member is gone, or does not come within ``limit_s``.
        """
        if self.shards is None:
            return self.member.broken
        failed, broken = self.shards.agree(self.failed, self.member.broken, limit_s=limit_s)
        self.failed = failed
        if failed or broken:
            self.member.fail()  # if this rank has not heard of it yet
        return failed or broken

    def average(self, *, without: Collection[int] = (), rank: int = 0) -> None:
        """Average the weights over the ranks that have trained; all ranks of the generation call
        this.

        Args:
            without: ranks that have no weights yet.
            rank: this one.

        Raises:
            RuntimeError: a rank is gone; this rank's weights are unchanged.
        """
        group = self.group.group
        ranks = 1 if group is None else dist.get_world_size(group)
        if group is None or ranks - len(without) < 2:
            return
        self.sum.is_sending = True
        parameters = [p for module in self.modules for p in module.parameters()]
        means = torch.cat([p.detach().reshape(-1) for p in parameters])
        means = torch.zeros_like(means) if rank in without else means / (ranks - len(without))
        dist.all_reduce(means, group=group)
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, mean in zip(parameters, torch.split(means, sizes), strict=True):
            parameter.data.copy_(mean.view_as(parameter))  # versions show what a script writes

    def remain(self) -> None:
        """Keep the group of all who have trained for what follows the training, and report to the
        coordinator how this process ends."""
        if self.shards is not None:
            self.group.close()
        at_end(self._end)

    def _end(self, problem: str) -> None:
        if not problem:
            self.member.done()
        self.member.close()
        if self.shards is None:
            self.group.destroy()

    def close(self) -> None:
        """End the connection and the group."""
        self.member.close()
        self.group.close()

    def _abort(self, depart: Depart | None) -> None:
        """Make collectives fail that wait for a lost rank. If this rank has to leave, end the
        process when its training thread does not react: gloo may begin a send on a connection
        that has just broken, and then never wakes the waiter (seen with 2.13)."""
        self.group.abort()
        until_s = time.monotonic() + LEAVE_S
        while depart is not None and self.member.is_dismissed:
            if time.monotonic() > until_s:
                self._warn(
                    f"this member leaves: {depart.reason}. Its training thread has not come out of "
                    f"its step for {LEAVE_S:g} s, so the process ends here"
                )
                end_process(depart.exit_status())
            time.sleep(0.1)

    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        if self.shares_buffers and module.training and torch.is_grad_enabled():
            self.sum.share_buffers(module)

    def _on_error(self) -> None:
        """Mark the step as failed; called in any thread."""
        if not self.failed:
            self.failed = True
            self.member.fail()


def folder_of(environ: Mapping[str, str]) -> ElasticFolder:
    """Return the folder of this process's elastic run.

    Raises:
        UsageError: it has none.
    """
    place = environ.get(ELASTIC_ENV)
    if not place and environ.get(GENERATION_ENV):
        raise UsageError(
            "`elastic: {engine: restart}` starts the ranks again at each change, and this script "
            "changes in place: say engine: in_place in the job spec, or use hydroslurm.Run"
        )
    if not place:
        raise UsageError(
            f"this process belongs to no elastic run, for {ELASTIC_ENV} is not set. Give the job "
            "spec an `elastic:` section and submit it"
        )
    return ElasticFolder(run=Path(place).absolute())

"""One job as Slurm, its run folder and its ranks tell it together: what every verb shows or needs.
How it came about: :mod:`~hydroslurm.observe.history`.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from hydroslurm.checkpoint.deadline import SAFETY
from hydroslurm.core.events import Event, read_events
from hydroslurm.core.files import read_regular
from hydroslurm.core.goodput import Goodput
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import RankStatus, Saver, read_status
from hydroslurm.errors import LaunchError, RunFolderError, SpecError
from hydroslurm.jobs.plan import Plan, Submission, read_plan, read_submission
from hydroslurm.jobs.supervisor.attempts import (
    Attempt,
    Attempts,
    count_preemptions,
    count_restarts,
)
from hydroslurm.jobs.supervisor.conditions import (
    Condition,
    final_condition,
    read_conditions,
)
from hydroslurm.observe.history import (
    PlainAttempt,
    all_pauses,
    attempts_of,
    in_order,
    newest,
    of_ranks,
    of_slurm,
    of_status,
    pause_now,
)
from hydroslurm.observe.training import SlowRank, Training, ranks_dirs_of, slow_ranks
from hydroslurm.slurm.policy import PreemptAction, SitePolicy, StopReason
from hydroslurm.slurm.values import Job, JobState

if TYPE_CHECKING:
    from hydroslurm.jobs.spec.job import TrainingJob

_MOST_BYTES = 16 << 20
"""Of a spec, and of the events that are searched for pauses."""
STUCK_S = 60.0
"""Delay worth a look: of a step that takes this long and ten times its predecessors' time, or of an
overdue heartbeat."""
LOUD = frozenset(
    {
        JobState.FAILED,
        JobState.TIMEOUT,
        JobState.NODE_FAIL,
        JobState.BOOT_FAIL,
        JobState.OUT_OF_MEMORY,
        JobState.DEADLINE,
        JobState.REQUEUE_HOLD,
        JobState.SPECIAL_EXIT,
        JobState.LAUNCH_FAILED,
    }
)
_HAS_PROCESSES = frozenset(
    {JobState.RUNNING, JobState.SUSPENDED, JobState.STOPPED, JobState.RESIZING}
)


@dataclass(frozen=True)
class WorkAtRisk:
    """Work that would be lost.

    Attributes:
        why: the reason, in a few words.
        steps: upper bound; None if steps are not reported.
        seconds: upper bound of the work's time; None if even that is unknown.
    """

    why: str
    steps: int | None = None
    seconds: float | None = None

    @property
    def is_nothing(self) -> bool:
        return self.steps == 0 or self.seconds == 0


@dataclass(frozen=True)
class JobView:
    """A job at one moment, with a spec or without. Each part is read when it is first asked for: a
    line of ``list`` rests on a few small files, ``describe`` reads everything. What is unknown or
    meaningless is None.

    Attributes:
        run: its folder; of several trainings, that of the one which is meant.
        slurm: as slurmctld or accounting has it; None when neither can tell.
        records: its attempts in Slurm's accounting.
        followed: what its run folders tell, where somebody has read them already.
        policy: what the site does to it; None if that was not asked.
        forgotten_epoch_s: since when Slurm lists it no more: it has ended, and nobody knows how.
    """

    run: RunDir
    slurm: Job | None
    records: Sequence[Job] = ()
    followed: tuple[Training, ...] = ()
    policy: SitePolicy | None = None
    now_epoch_s: float = field(default_factory=time.time)
    forgotten_epoch_s: float | None = None

    # --- what was asked for, and what became of it ------------------------------------------------

    @cached_property
    def has_spec(self) -> bool:
        return os.path.lexists(self.run.job_yaml)

    @cached_property
    def spec(self) -> TrainingJob:
        """What was asked for, of a job with a spec.

        Raises:
            RunFolderError: it cannot be read.
        """
        from hydroslurm.jobs.spec.reading import loads  # nobody else pays for pydantic

        path = self.run.job_yaml
        try:
            text = read_regular(path, limit_bytes=_MOST_BYTES).decode(errors="replace")
            return loads(text, name=str(path), folder=self.run.root).job
        except OSError as error:
            raise RunFolderError(f"cannot read {path}: {error.strerror}") from None
        except SpecError as error:
            raise RunFolderError(f"{path} was written by another version: {error}") from None

    @cached_property
    def plan(self) -> Plan | None:
        """What the spec is on Slurm; None when the submission was interrupted."""
        with contextlib.suppress(LaunchError):
            return read_plan(self.run.plan_json)
        return None

    @cached_property
    def submission(self) -> Submission | None:
        """What was asked for; None where hydroslurm did not submit it."""
        with contextlib.suppress(RunFolderError):
            return read_submission(self.run.root)
        return None

    @property
    def name(self) -> str:
        told = self.slurm.name if self.slurm is not None else ""
        asked = self.submission
        if asked is not None and (self.has_spec or not told):
            return asked.name
        return told or self.run.root.name

    @cached_property
    def attempts(self) -> tuple[Attempt, ...]:
        """Of a job with a spec, as its supervisor has written them down; oldest first."""
        return Attempts(self.run.starts_jsonl).all()

    @cached_property
    def plain_attempts(self) -> tuple[PlainAttempt, ...]:
        """Of a job without a spec, as accounting or its first rank tells; oldest first."""
        return tuple(attempts_of(self.run, self.events, self.records))

    @property
    def restarts(self) -> int:
        """Of a job with a spec, failed or completed attempts that another one followed: what
        backoffLimit allows. Without one, Slurm's count."""
        if self.has_spec:
            return count_restarts(self.attempts)
        return (self.slurm.restart_count if self.slurm is not None else 0) or 0

    @property
    def preemptions(self) -> int:
        """Attempts that Slurm has preempted, as far as its supervisor, its ranks or accounting
        tell; what preemptionLimit is compared with."""
        if self.has_spec:
            return count_preemptions(self.attempts)
        known = {one.restart_count for one in self.conditions if one.type == "Preempted"}
        told = (one for one in self.plain_attempts if one.message[:9] == "preempted")
        return len(known | {one.restart_count for one in told})

    @property
    def known_preemptions(self) -> tuple[int | None, bool]:
        """The same without accounting: how many, None where nobody looks; and whether there may be
        more, which no rank could tell from a requeue by hand."""
        if self.has_spec:
            return count_preemptions(self.attempts), False
        first, restarts = self.first, self.restarts
        known = {} if first is None else dict(first.preempted)
        is_told = restarts == 0 or (first is not None and bool(first.saver))
        return (len(known) if is_told else None), restarts > len(known)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The newest of the first rank's, oldest first; none where they cannot be read."""
        try:
            files = self.run.rank_event_files()
            found = read_events(files[min(files)], most_bytes=_MOST_BYTES) if files else ()
            return tuple(event for event in found if self._is_own(event.job_id))
        except OSError:
            return ()

    @cached_property
    def conditions(self) -> tuple[Condition, ...]:
        """All of them, oldest first, with the pauses that its first rank has written down."""
        said = [*all_pauses(self.events), *read_conditions(self.run.conditions_jsonl)]
        if not self.has_spec:
            said += [*of_ranks(self.events), *of_slurm(self.slurm)]
        return in_order(said, self.slurm)

    @cached_property
    def condition(self) -> Condition | None:
        """What it is now; None before anybody has said anything."""
        said = [*read_conditions(self.run.conditions_jsonl), *pause_now(self.first)]
        if not self.has_spec:
            said += [*of_slurm(self.slurm), *of_status(self.first)]
        return newest(in_order(said, self.slurm))

    @property
    def is_over(self) -> bool:
        """Whether nothing of it will run any more."""
        said = read_conditions(self.run.conditions_jsonl)
        return self.has_ended or final_condition(said) is not None

    @property
    def job(self) -> Job:
        """As Slurm has it, of a view that rests on its answer."""
        assert self.slurm is not None
        return self.slurm

    @cached_property
    def rank_files(self) -> dict[int, str]:
        """The status file of each rank that has announced itself."""
        return self.run.rank_status_names()

    @cached_property
    def first(self) -> RankStatus | None:
        """The status of its first rank; None where that tells nothing of this job."""
        try:
            files = self.rank_files
            first = read_status(files[min(files)]) if files else None
        except OSError:
            return None
        return first if first is not None and self._is_own(first.job_id) else None

    def _is_own(self, job_id: int | None) -> bool:
        """Whether a rank speaks of this job: a named folder may have had others."""
        return self.has_spec or self.slurm is None or job_id == self.slurm.job_id

    # --- its ranks --------------------------------------------------------------------------------

    @cached_property
    def trainings(self) -> tuple[Training, ...]:
        """Its run folders, in the order in which they first began."""
        if self.followed:
            return self.followed
        folders = (self.run,) if self.slurm is None else ranks_dirs_of(self.slurm)
        return tuple(Training(folder).read() for folder in folders)

    @property
    def ranks(self) -> tuple[RankStatus, ...]:
        """All that ever told, as they see themselves."""
        return tuple(rank for training in self.trainings for rank in self.ranks_of(training))

    def ranks_of(self, training: Training) -> tuple[RankStatus, ...]:
        """The same of one training. A rank that wrote no end of an ended job was killed."""
        ranks = tuple(training.statuses.values())
        if not self.has_ended:
            return ranks
        return tuple(one if one.state == "ended" else replace(one, state="killed") for one in ranks)

    @property
    def silent(self) -> Iterator[tuple[int, str]]:
        """Ranks that have written events, and why their status is not known."""
        for training in self.trainings:
            for rank in training.run.rank_event_files() if training.problem is None else ():
                if rank not in training.statuses:
                    yield rank, training.unread.get(rank, "no status yet")

    @property
    def problem(self) -> str | None:
        """Why a run folder of it cannot be looked at."""
        return next((one.problem for one in self.trainings if one.problem is not None), None)

    @property
    def saver(self) -> Saver:
        """Who saves at a stop, as any rank of any attempt has said."""
        said = {rank.saver for rank in self.ranks if self._is_own(rank.job_id)}
        savers: tuple[Saver, ...] = ("attempt_began", "stops_taken")
        return next((saver for saver in savers if saver in said), "")

    # --- its present attempt ----------------------------------------------------------------------
    #
    # With several trainings, what does not cover all ranks is that of the one with the oldest
    # checkpoint, which would lose most.

    @cached_property
    def _at_work(self) -> tuple[Training, ...]:
        """The trainings that run; if none does, the last."""
        runs = (
            training
            for training in self.trainings
            if any(rank.state != "ended" for rank in training.ranks(self.job.restart_count))
        )
        return tuple(runs) or self.trainings[-1:]

    @cached_property
    def _training(self) -> Training:
        """The one that would lose most."""
        count = self.job.restart_count
        return min(self._at_work, key=lambda one: (one.commit or one.began(count) or (0, 0))[1])

    @cached_property
    def present(self) -> tuple[RankStatus, ...]:
        """The ranks of this attempt."""
        count = self.job.restart_count
        return tuple(rank for training in self._at_work for rank in training.ranks(count))

    @cached_property
    def _lead(self) -> RankStatus | None:
        """The first of them that tells its step."""
        ranks = self._training.ranks(self.job.restart_count)
        return next((rank for rank in ranks if rank.step is not None), None)

    # --- as a line of ``top`` ---------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether Slurm says so, or lists it no more; :attr:`is_over` also asks the supervisor."""
        ended = self.slurm is not None and self.slurm.state.has_ended
        return ended or self.forgotten_epoch_s is not None

    @cached_property
    def _is_alive(self) -> bool:
        return not (self.has_ended or self.job.state.is_waiting)

    @cached_property
    def _has_ranks(self) -> bool:
        return self._is_alive and bool(self.present)

    @cached_property
    def state(self) -> str:
        """Slurm's; or PARKED (all ranks), VACATED and STOPPING, which only its ranks know; or
        FORGOTTEN."""
        if self.forgotten_epoch_s is not None:
            return "FORGOTTEN"
        if self.job.state is JobState.RUNNING and self.present:
            if any(rank.state == "stopping" for rank in self.present):
                return "STOPPING"
            if self._all_parked:
                return "VACATED" if self.vacated_bytes else "PARKED"
        return self.job.state.value

    @property
    def reason(self) -> str:
        return "" if self.job.reason in ("None", "") else self.job.reason

    @property
    def parked(self) -> int | None:
        return self._parked if self._has_ranks else None

    @cached_property
    def _parked(self) -> int:
        return sum(rank.state == "parked" for rank in self.present)

    @property
    def _all_parked(self) -> bool:
        return 0 < self._parked == len(self.present)

    @property
    def n_ranks(self) -> int | None:
        """Those that told, or those that they are joined with."""
        if not self._has_ranks:
            return None
        count = self.job.restart_count
        groups = (training.ranks(count) for training in self._at_work)
        return sum(max([len(ranks), *(rank.world_size for rank in ranks)]) for ranks in groups)

    @property
    def slow(self) -> tuple[SlowRank, ...]:
        """Ranks of this attempt that the others wait for."""
        count = self.job.restart_count
        return tuple(slow for one in self._at_work for slow in slow_ranks(one.ranks(count)))

    @property
    def size(self) -> tuple[int, int, int] | None:
        """Members of an elastic job that train now, that are wanted, and at most."""
        return self._training.size if self._is_alive else None

    @cached_property
    def _told_step(self) -> int | None:
        """Of an elastic run as its coordinator tells it, else as the first rank that does."""
        if self._training.elastic_step is not None:
            return self._training.elastic_step
        return self._lead.step if self._lead else None

    @property
    def step(self) -> int | None:
        return self.commit_step if self._told_step is None else self._told_step

    @property
    def steps_per_s(self) -> float | None:
        """0 while all ranks are held or nothing moves, otherwise the last measurement."""
        if self._lead is None or self._lead.steps_per_s is None or not self._is_alive:
            return None
        held = self.job.state is JobState.SUSPENDED or self._all_parked
        return 0.0 if held or self._stands_still else self._lead.steps_per_s

    @property
    def commit(self) -> tuple[int, int] | None:
        """Step and moment (epoch ns) of the newest durable checkpoint."""
        return self._training.commit

    @property
    def commit_step(self) -> int | None:
        return self.commit[0] if self.commit else None

    @property
    def commit_age_s(self) -> float | None:
        return max(0.0, self.now_epoch_s - self.commit[1] / 1e9) if self.commit else None

    @property
    def pauses(self) -> int | None:
        """In this attempt."""
        return max(rank.pauses for rank in self.present) if self._has_ranks else None

    @property
    def vacated_bytes(self) -> int:
        """Device memory of its ranks that is on their hosts."""
        return sum(rank.vacated_bytes for rank in self.present) if self._has_ranks else 0

    @property
    def goodput(self) -> Goodput | None:
        """Of all attempts, as far as they are known."""
        return self._training.goodput

    @property
    def pause_counts(self) -> tuple[int, ...]:
        """Of all ranks and attempts, as :class:`~hydroslurm.core.status.RankStatus` has it."""
        return tuple(map(sum, zip(*(rank.pause_counts for rank in self._told), strict=True)))

    @property
    def pause_sum_s(self) -> float:
        return sum(rank.pause_sum_s for rank in self._told)

    @property
    def _told(self) -> list[RankStatus]:
        return [rank for training in self._at_work for rank in training.statuses.values()]

    @property
    def left_s(self) -> float | None:
        """Until its time limit."""
        end_s = self.job.end_epoch_s
        return max(0.0, end_s - self.now_epoch_s) if self._is_alive and end_s else None

    @property
    def stuck(self) -> bool:
        """No step for a long time, or no heartbeat from the first rank."""
        is_running = self._is_alive and self.job.state is JobState.RUNNING
        return is_running and self._stands_still

    @cached_property
    def _stands_still(self) -> bool:
        lead = self._lead
        if lead is None or not lead.steps_per_s or self._parked:
            return False
        # a shared file system may show writes a minute late
        if lead.heartbeat_s is not None and self._silent_s > STUCK_S + 3.0 * lead.heartbeat_s:
            return True
        return self._stuck_s > max(STUCK_S, 10.0 / lead.steps_per_s)

    @property
    def _silent_s(self) -> float:
        """Since the lead last told anything."""
        as_of_ns = self._lead.as_of.epoch_ns if self._lead else 0
        return max(0.0, self.now_epoch_s - as_of_ns / 1e9)

    @property
    def _stuck_s(self) -> float:
        """How long the lead had been at its step by then."""
        lead = self._lead
        if lead is None or lead.step_since is None:
            return 0.0
        return max(0.0, (lead.as_of.epoch_ns - lead.step_since.epoch_ns) / 1e9)

    # --- what a preemption now would cost ---------------------------------------------------------

    @cached_property
    def _began(self) -> tuple[int, int] | None:
        """Step and moment at which the Run of this attempt began, which will save at a stop."""
        return self._training.began(self.job.restart_count)

    @property
    def unsaved_steps(self) -> int | None:
        """Estimate of the steps since the newest durable checkpoint, including those since the
        rank's last report; None if steps or checkpoints are not reported."""
        base = self.commit or self._began
        if base is None or self._told_step is None or self._lead is None:
            return None
        since_s = 0.0 if self._parked else self._silent_s
        made = math.ceil((self._lead.steps_per_s or 0.0) * since_s)
        return max(0, self._told_step - base[0]) + made

    @cached_property
    def loss(self) -> WorkAtRisk | None:
        """Work that a preemption now would lose: an upper bound, or 0; None for a job that waits or
        has ended, with nothing to lose."""
        policy, save_s = self.policy, self._training.save_s
        if self.forgotten_epoch_s is not None or self.job.state not in _HAS_PROCESSES:
            return None
        if policy is not None and policy.action is PreemptAction.PAUSE:
            return WorkAtRisk("a preemption pauses it in place", 0, 0.0)
        unsaved = self._unsaved
        if self.job.state is not JobState.RUNNING:
            return replace(unsaved, why="a suspended job hears no signal but SIGKILL")
        if self._began is None:
            return unsaved
        if policy is None:
            return replace(unsaved, why="this site's grace is not known")
        if save_s is None:
            return replace(unsaved, why="how long a save takes is not known yet")
        left_s = policy.time_left(StopReason.PREEMPTED).seconds
        if policy.action is PreemptAction.NEVER:
            left_s = policy.kill_after_s  # an operator's stop leaves least
        needs_s = self._step_s + SAFETY * save_s
        if needs_s <= left_s:
            return WorkAtRisk(f"a save takes {save_s:.1f} s, and has {left_s:.0f} s", 0, 0.0)
        message = f"a step and a save may take {needs_s:.0f} s, and have {left_s:.0f} s"
        return replace(unsaved, why=message)

    @property
    def _unsaved(self) -> WorkAtRisk:
        if self._began or self.commit:
            why = "since the last commit" if self.commit else "nothing is committed yet"
        else:
            why = "all since its start, but for what it saves itself"
        # with only an earlier attempt's checkpoint, work before this attempt is not at stake
        commit_s = self.commit[1] / 1e9 if self.commit else None
        begins_s = max((s for s in (commit_s, self.job.start_epoch_s) if s), default=None)
        seconds = None if begins_s is None else max(0.0, self.now_epoch_s - begins_s)
        steps = self.unsaved_steps if self._began else None
        return WorkAtRisk(why if seconds is not None else "its start is not known", steps, seconds)

    @property
    def _step_s(self) -> float:
        """Bound on the time to the next safe point."""
        steps_per_s = self._lead.steps_per_s if self._lead else None
        if steps_per_s:
            return max(1.0 / steps_per_s, self._stuck_s)
        return self._stuck_s if self._stuck_s or steps_per_s is None else math.inf

    def attention(self) -> tuple[object, ...]:
        """Sort key, most urgent first: jobs that lose work and cannot save, that failed or hang, or
        would lose most; then running, waiting and ended ones."""
        held = self.job.state is JobState.SUSPENDED or self.state == "STOPPING"
        at_stake_s = 0.0
        if self.loss is not None and not self.loss.is_nothing:
            at_stake_s = self.loss.seconds or 0.0
        if held and at_stake_s:
            urgency = 0
        elif self.stuck or (self.job.state in LOUD and self.forgotten_epoch_s is None):
            urgency = 1
        elif self.loss is not None:
            urgency = 2
        else:
            urgency = 4 if self.has_ended else 3
        return (urgency, -at_stake_s, not self.parked, self.job.job_id)

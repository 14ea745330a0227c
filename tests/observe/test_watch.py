"""What is shown of jobs, from hand-made run folders and answers of Slurm's."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.cells import cell_len
from statusfile import write_status

from hydroslurm.core.events import Event, EventKind
from hydroslurm.core.jobid import JobId
from hydroslurm.core.rundir import RunDir, comment_for
from hydroslurm.core.status import Moment, RankStatus, load_status
from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.errors import ControllerUnreachable
from hydroslurm.observe.folder import FollowedRun, RunFacts, SlowRank, slow_ranks
from hydroslurm.observe.metrics import JobCollector
from hydroslurm.observe.row import Row
from hydroslurm.observe.table import COLUMNS, layout, lost
from hydroslurm.observe.watcher import View, Watcher
from hydroslurm.slurm.policy import PreemptAction, SitePolicy
from hydroslurm.slurm.values import Job, JobState

NOW_S = 1_800_000_000.0
HOSTILE = "\x1b[31mred\x07\t\n\r\u202e\u0301日本語" * 3
REQUEUED = SitePolicy(action=PreemptAction.REQUEUE, grace_s=10, grace_why="GraceTime=10")
PAUSED = SitePolicy(action=PreemptAction.PAUSE)


def event(kind: EventKind, *, at_s: float = 0.0, **values: Any) -> Event:
    """An event so many seconds after NOW_S."""
    of_event = {n: values.pop(n) for n in ("rank", "restart_count", "pid", "step") if n in values}
    return Event(kind, *moment(at_s), data=values, **of_event)


def moment(at_s: float) -> Moment:
    return Moment(int((10_000 + at_s) * 1e9), int((NOW_S + at_s) * 1e9))


def began(step: int = 0, *, at_s: float = -100.0, **values: Any) -> Event:
    return replace(event(EventKind.ATTEMPT_BEGAN, at_s=at_s, **values), data={"step": step})


def committed(saved: int, *, at_s: float, **values: Any) -> Event:
    data = {"checkpoint_step": saved, "seconds": 1.0}
    return event(EventKind.SAVE_COMMITTED, at_s=at_s, **values, **data)


def parked(pause: int, park_us: float, **values: Any) -> Event:
    return event(EventKind.PARKED, pause=pause, park_us=park_us, causes=["user"], **values)


def write(path: Path, *events: Event) -> None:
    """Into the log of a rank, and its status."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(f"{one.to_json()}\n" for one in events)
    write_status(path)


def job(job_id: int = 7, state: JobState = JobState.RUNNING, **values: Any) -> Job:
    given = {"name": "n", "user": "u", "partition": "low", "start_epoch_s": int(NOW_S) - 200}
    return Job(job_id=job_id, state=state, **{**given, **values})


class Slurm:
    """Answers what it is told to, and counts how often it is asked."""

    def __init__(self, *jobs: Job) -> None:
        self.answer: tuple[Job, ...] | Exception = jobs
        self.asked = 0

    def jobs(
        self, *, user: str | None = None, ids: Collection[int] | None = None
    ) -> tuple[Job, ...]:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def watcher(slurm: Slurm, **options: Any) -> Watcher:
    return Watcher(slurm, user=None, policies=False, clock=lambda: NOW_S, **options)  # type: ignore[arg-type]


def row_of(one: Job, facts: RunFacts, policy: SitePolicy | None = None) -> Row:
    return Row(job=one, facts=facts, policy=policy, now_epoch_s=NOW_S)


def followed(run: RunDir) -> RunFacts:
    following = FollowedRun(run)
    following.read()
    return following.facts(0)


# --- reading -------------------------------------------------------------------------------------


def test_only_what_was_replaced_is_read(tmp_path: Path) -> None:
    """The second look reads nothing, the third one file of two; what is no status, or is taken away
    by a FIFO, changes nothing."""
    run = RunDir(tmp_path)
    write(run.rank_events(0), event(EventKind.INSTALLED), began(5))
    write(run.rank_events(1), event(EventKind.INSTALLED, rank=1))
    following = FollowedRun(run)
    assert following.read() == 2
    assert following.facts(0).began == (5, int((NOW_S - 100) * 1e9))
    assert following.read() == 0
    write(run.rank_events(0), committed(9, at_s=-3))
    assert following.read() == 1
    assert following.facts(0).commit == (9, int((NOW_S - 3) * 1e9))
    run.rank_status(1).unlink()
    os.mkfifo(run.rank_status(1))
    assert following.read() == 0


def test_facts_of_an_attempt_before(tmp_path: Path) -> None:
    """A requeued job knows its checkpoint from the attempt before, but not where that began."""
    run = RunDir(tmp_path)
    write(run.rank_events(0), event(EventKind.INSTALLED), began(30), committed(40, at_s=-50))
    write(run.rank_events(0), event(EventKind.INSTALLED, restart_count=1, at_s=-20))
    following = FollowedRun(run)
    following.read()
    facts = following.facts(1)
    assert (facts.has_run, facts.began) == (False, None)
    assert facts.commit == (40, int((NOW_S - 50) * 1e9))
    assert following.facts(0).ranks == ()


def test_the_newest_step_counts(tmp_path: Path) -> None:
    """The heartbeat gives the step and the rate, in every rank; of an earlier attempt it gives
    nothing, and without one two events give both."""
    run = RunDir(tmp_path)
    write(run.rank_events(0), event(EventKind.FIRST_STEP, at_s=-20, step=1))
    write(run.rank_events(0), committed(40, at_s=-1), event(EventKind.SAVE_STAGED, step=41))
    facts = followed(run)
    assert (facts.step, facts.steps_per_s, facts.told_every_s) == (41, 2.0, None)
    status = load_status(run.rank_status(0))

    def told(at_s: float, since_s: float, restart_count: int = 0) -> RunFacts:
        beat = replace(status, step=50, step_since=moment(since_s), as_of=moment(at_s))
        beat = replace(beat, steps_per_s=5.0, heartbeat_s=10.0, restart_count=restart_count)
        run.rank_status(0).write_text(beat.to_json())
        return followed(run)

    facts = told(5, 2)
    assert (facts.step, facts.steps_per_s, facts.told_every_s) == (50, 5.0, 10.0)
    assert (facts.stuck_s, facts.step_epoch_ns) == (3.0, moment(5).epoch_ns)
    assert told(6, 6, restart_count=1).step is None


# --- what would be lost --------------------------------------------------------------------------

RUN = RunFacts(has_run=True, began=(0, int((NOW_S - 100) * 1e9)), step=120, steps_per_s=2.0)
RUN = replace(RUN, step_epoch_ns=int((NOW_S - 4) * 1e9), save_s=2.0)
SAVED = replace(RUN, commit=(100, int((NOW_S - 14) * 1e9)))


@pytest.mark.parametrize(
    ("facts", "policy", "changed", "words"),
    [
        (SAVED, REQUEUED, {}, "0"),
        (SAVED, PAUSED, {}, "0"),
        (RunFacts(), PAUSED, {}, "0"),
        # no Run: all since the start
        (RunFacts(), REQUEUED, {}, "≤3m"),
        (RunFacts(has_run=False, step=9), REQUEUED, {}, "≤3m"),
        (RunFacts(), REQUEUED, {"start_epoch_s": None}, "?"),
        # 20 steps since the commit, and 4 s at 2 steps/s since the rank last told
        (SAVED, None, {}, "≤28 st"),
        (SAVED, REQUEUED, {"state": JobState.SUSPENDED}, "≤28 st"),
        (replace(SAVED, save_s=60.0), REQUEUED, {}, "≤28 st"),
        (replace(SAVED, save_s=None), REQUEUED, {}, "≤28 st"),
        (replace(SAVED, stuck_s=600.0), REQUEUED, {}, "≤28 st"),
        (replace(SAVED, steps_per_s=0.01), REQUEUED, {}, "≤21 st"),
        (replace(RUN, save_s=None), REQUEUED, {}, "≤128 st"),
        (replace(SAVED, step=None, save_s=None), REQUEUED, {}, "≤14s"),
        (SAVED, REQUEUED, {"state": JobState.PENDING}, "-"),
        (SAVED, REQUEUED, {"state": JobState.COMPLETED}, "-"),
    ],
)
def test_lost(
    facts: RunFacts, policy: SitePolicy | None, changed: dict[str, Any], words: str
) -> None:
    """0 only where nothing would be lost; else an upper bound, in steps where they are told."""
    given = replace(job(), **changed)
    assert lost(row_of(given, facts, policy).loss) == words


def test_order() -> None:
    """What loses work while it cannot be saved comes first, then what failed, then what is at
    stake, what waits, and what has ended well."""
    jobs = [
        (job(1, JobState.COMPLETED), RunFacts()),
        (job(2, JobState.PENDING), RunFacts()),
        (job(3), SAVED),
        (job(4, start_epoch_s=int(NOW_S) - 9), RunFacts()),
        (job(5), RunFacts()),
        (job(6), replace(SAVED, stuck_s=600.0)),
        (job(7, JobState.OUT_OF_MEMORY), RunFacts()),
        (job(9), replace(SAVED, told_every_s=10.0)),
        (job(10), replace(SAVED, step_epoch_ns=int((NOW_S - 100) * 1e9), told_every_s=10.0)),
        (job(8, JobState.SUSPENDED), SAVED),
    ]
    rows = tuple(row_of(one, facts, REQUEUED) for one, facts in jobs)
    order = [row.job.job_id for row in View(rows, NOW_S, NOW_S).rows]
    assert order == [8, 6, 7, 10, 5, 4, 3, 9, 2, 1]


def test_an_elastic_job_has_a_size(tmp_path: Path) -> None:
    """Members now, wanted and at most, and the step, as its coordinator has last said; nothing of
    what is no such file."""
    elastic = ElasticFolder(run=tmp_path)
    status = {"size": 3, "wanted": 4, "max": 8, "step": 12}
    elastic.write(elastic.status_json, status)
    facts = followed(RunDir(tmp_path))
    assert (facts.size, facts.step) == ((3, 4, 8), 12)
    row = row_of(job(), facts)
    assert "3/4/8" in layout([row], 80)[1][0]
    elastic.write(elastic.status_json, {**status, "size": "3"})
    assert followed(RunDir(tmp_path)).size is None


# --- showing -------------------------------------------------------------------------------------


SLOW = SlowRank(3, "n2", 1.84)


@pytest.mark.parametrize(
    ("times_s", "named"),
    [
        ([0.5, 0.5, 0.5, 0.9], [(3, 1.8)]),
        ([0.9, 0.5], [(0, 1.8)]),
        ([0.5, 0.62], []),  # within the noise
        ([0.01, 0.03], []),  # of a step of a second
        ([0.5, 0.9, 0.95, 0.5, 0.5], [(2, 1.9), (1, 1.8)]),
        ([0.9], []),
        ([0.9, None], []),
    ],
)
def test_slow_ranks(times_s: list[float | None], named: list[tuple[int, float]]) -> None:
    """Those that are a quarter later than the median of the others, and a tenth of the step."""
    ranks = [
        RankStatus(n, "running", moment(0), first_collective_s=one, steps_per_s=1.0)
        for n, one in enumerate(times_s)
    ]
    assert [(one.rank, round(one.factor, 1)) for one in slow_ranks(ranks)] == named


def test_lines_fit_every_width() -> None:
    """Whatever the names, no line is wider than the terminal or holds what moves its cursor; at 80
    columns the columns that matter are all there."""
    long = {"name": HOSTILE, "user": HOSTILE, "partition": HOSTILE}
    far = replace(SAVED, step=10**6, commit=(10**6 - 5, int(NOW_S * 1e9)))
    jobs = [
        (job(10**6, **long), replace(SAVED, size=(1000, 2000, 4096), slow=(SLOW,))),
        (job(8, JobState.SUSPENDED, array_job_id=5, restart_count=12), far),
        (job(9, JobState.PENDING, name="", reason=HOSTILE), RunFacts()),
    ]
    rows = [row_of(one, facts) for one, facts in jobs]
    for width in range(1, 260):
        head, lines = layout(rows, width)
        assert len(lines) == len(rows)
        assert max(map(cell_len, [head, *lines])) <= width
        assert all(line.isprintable() for line in lines)
    head, _ = layout(rows[1:], 80)
    assert not {"SIZE", "SLOW"} & set(head.split())
    assert "r3 1.8x" in layout(rows, 80)[1][0]
    for title in ("JOB", "NAME", "STATE", "PARK", "STEP", "STEP/S", "AGO", "PRE", "LEFT", "LOST"):
        assert title in head.split()
    assert {column.title for column in COLUMNS} == set(layout(rows, 259)[0].split())


# --- from one moment to the next -----------------------------------------------------------------


def test_jobs_come_and_go(tmp_path: Path) -> None:
    """One request each time; a job that Slurm has forgotten is shown as ended, one that ended
    before our eyes only as long as Slurm knows it; Slurm's absence changes no line."""
    run = RunDir(tmp_path)
    write(run.rank_events(0), event(EventKind.INSTALLED, world_size=2), began(), parked(1, 50.0))
    write(run.rank_events(1), event(EventKind.INSTALLED, rank=1))
    first = job(1, comment=comment_for(run), end_epoch_s=int(NOW_S) + 60)
    waiting = job(3, JobState.PENDING, array_job_id=3, array_tasks="4-9%1")
    slurm = Slurm(first, job(2), waiting)
    watching = watcher(slurm, ids=tuple(map(JobId, (1, 2, 3, 99))))
    view = watching.look()
    by_id = {row.job_id: row for row in view.rows}
    assert set(by_id) == {"1", "2", "3_[4-9%1]"}
    assert (by_id["1"].parked, by_id["1"].ranks, by_id["1"].left_s) == (1, 2, 60.0)
    assert (by_id["2"].ranks, view.missing) == (None, (JobId(99),))

    write(run.rank_events(1), parked(1, 60.0, rank=1))
    slurm.answer = (first, replace(job(2), state=JobState.COMPLETED))
    rows = {row.job_id: row.state for row in watching.look().rows}
    assert rows == {"1": "PARKED", "2": "COMPLETED"}
    slurm.answer = ControllerUnreachable("away")
    away = watching.look()
    assert {row.job_id: row.state for row in away.rows} == rows
    assert away.error == "away"
    slurm.answer = ()
    assert [(row.job_id, row.state) for row in watching.look().rows] == [("1", "FORGOTTEN")]
    assert slurm.asked == 4


def test_metrics(tmp_path: Path) -> None:
    """What is exposed can be parsed, with hostile names whole in the labels, and is in the docs;
    scrapes that are close to each other share one request."""
    run = RunDir(tmp_path)
    write(run.rank_events(0), event(EventKind.INSTALLED), began(), parked(1, 50.0), parked(1, 9e9))
    write(run.rank_events(0), event(EventKind.RESUMED, pause=1), committed(40, at_s=-7, step=52))
    write(run.rank_events(0), parked(2, 700.0))
    name = 'a "b" \\ \n' + HOSTILE
    slurm = Slurm(job(1, name=name, comment=comment_for(run), restart_count=0), job(2))
    now = itertools.count()
    collector = JobCollector(watcher(slurm), every_s=2.5, monotonic=lambda: float(next(now)))
    registry = collector.registry()
    from prometheus_client import generate_latest

    for _ in range(3):
        text = generate_latest(registry).decode()
    assert slurm.asked == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {
        (sample.name, sample.labels.get("le", "")): sample.value
        for family in families.values()
        for sample in family.samples
        if sample.labels.get("job_id", "1") == "1" and "state" not in sample.labels
    }
    told = {
        "job_parked_ranks": 1, "job_step": 52, "job_unsaved_steps": 12,
        "job_last_commit_timestamp_seconds": NOW_S - 7, "job_preemptions_total": 0,
        "job_pauses_total": 2, "park_seconds_count": 2, "slurm_up": 1,
        "park_seconds_sum": pytest.approx(750e-6),
    }  # fmt: skip
    assert {name: values[f"hydroslurm_{name}", ""] for name in told} == told
    buckets = [values["hydroslurm_park_seconds_bucket", le] for le in ("0.0001", "0.001")]
    assert buckets == [1, 2]
    labels = families["hydroslurm_job_step"].samples[0].labels
    assert labels == {"job_id": "1", "name": name, "user": "u", "partition": "low"}
    assert all(family.documentation and family.type != "unknown" for family in families.values())
    page = (Path(__file__).parents[2] / "docs/watching.md").read_text()
    assert set(re.findall(r"`(hydroslurm_\w+?)(?:_total)?[`{]", page)) == set(families)
    slurm.answer = ControllerUnreachable("away")
    assert "hydroslurm_slurm_up 0.0" in generate_latest(registry).decode()
    assert slurm.asked == 2

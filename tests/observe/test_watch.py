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
from hydroslurm.observe.job import JobView
from hydroslurm.observe.metrics import JobCollector
from hydroslurm.observe.table import TOP, layout, lost
from hydroslurm.observe.training import Training, slow_ranks
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


def view(one: Job, *trainings: Training, policy: SitePolicy | None = None) -> JobView:
    return JobView(trainings[0].run, one, followed=trainings, policy=policy, now_epoch_s=NOW_S)


def told(*ranks: RankStatus, elastic: dict[str, Any] | None = None) -> Training:
    """What these ranks have told, of a run folder that nobody reads."""
    return Training(RunDir(Path("/run")), dict(enumerate(ranks)), elastic=elastic)


# --- reading -------------------------------------------------------------------------------------


def test_only_what_was_replaced_is_read(tmp_path: Path) -> None:
    """The second look reads nothing, the third one file of two; a FIFO in the place of a status is
    a status that cannot be read."""
    run = RunDir(tmp_path)
    write(run.rank_events(0), event(EventKind.INSTALLED), began(5))
    write(run.rank_events(1), event(EventKind.INSTALLED, rank=1))
    first = Training(run).read()
    assert list(first.statuses) == [0, 1]
    assert first.began(0) == (5, int((NOW_S - 100) * 1e9))
    assert first.read() is first
    write(run.rank_events(0), committed(9, at_s=-3))
    second = first.read()
    assert [second.statuses[n] is first.statuses[n] for n in (0, 1)] == [False, True]
    assert second.commit == (9, int((NOW_S - 3) * 1e9))
    run.rank_status(1).unlink()
    os.mkfifo(run.rank_status(1))
    third = second.read()
    assert third.read() is third
    run.rank_events(2).touch()
    (fifo, no_status) = view(job(), third).silent
    assert (fifo[0], "a regular file was expected" in fifo[1]) == (1, True), fifo
    assert no_status == (2, "no status yet")


def test_facts_of_an_attempt_before(tmp_path: Path) -> None:
    """A requeued job knows its checkpoint from the attempt before, but not where that began."""
    run = RunDir(tmp_path)
    write(run.rank_events(0), event(EventKind.INSTALLED), began(30), committed(40, at_s=-50))
    write(run.rank_events(0), event(EventKind.INSTALLED, restart_count=1, at_s=-20))
    found = Training(run).read()
    assert found.began(1) is None
    assert found.commit == (40, int((NOW_S - 50) * 1e9))
    assert (len(found.ranks(1)), found.ranks(0)) == (1, ())


def test_the_newest_step_counts(tmp_path: Path) -> None:
    """The heartbeat gives the step and the rate, in every rank; of an earlier attempt it gives
    nothing, and without one two events give both."""
    run = RunDir(tmp_path)
    write(run.rank_events(0), event(EventKind.FIRST_STEP, at_s=-20, step=1))
    write(run.rank_events(0), committed(40, at_s=-1), event(EventKind.SAVE_STAGED, step=41))
    found = view(job(), Training(run).read())
    assert (found.step, found.steps_per_s) == (41, 2.0)
    beat = replace(load_status(run.rank_status(0)), step=50, steps_per_s=5.0, heartbeat_s=10.0)
    found = view(job(), told(beat))
    assert (found.step, found.steps_per_s) == (50, 5.0)
    assert view(job(), told(replace(beat, restart_count=1))).step == 40  # the checkpoint's


def test_the_training_that_would_lose_most(tmp_path: Path) -> None:
    """Of several trainings all ranks count, and the step and checkpoint of the one that was saved
    longest ago; one that has ended is nobody's concern."""
    runs = [RunDir(tmp_path / name) for name in "abc"]
    for run, saved_s in zip(runs, (-5, -50, -500), strict=True):
        write(run.rank_events(0), event(EventKind.INSTALLED), began(), committed(7, at_s=saved_s))
    write(runs[2].rank_events(0), event(EventKind.UNINSTALLED))
    write(runs[1].rank_events(0), parked(1, 50.0, world_size=4))
    write(runs[1].rank_events(1), committed(6, at_s=-90, rank=1))
    found = view(job(), *(Training(run).read() for run in runs))
    assert (found.n_ranks, found.parked, found.commit_age_s) == (1 + 4, 1, 50.0)


# --- what would be lost --------------------------------------------------------------------------

RUN = RankStatus(0, "running", moment(-100), as_of=moment(-4), step=120, steps_per_s=2.0, save_s=2)
RUN = replace(RUN, attempt_step=0, attempt_began=moment(-100))
SAVED = replace(RUN, committed_step=100, committed=moment(-14))
STUCK = replace(SAVED, step_since=moment(-604))
NO_RUN = RankStatus(0, "running", moment(-100), step=9, save_s=2)


@pytest.mark.parametrize(
    ("rank", "policy", "changed", "words"),
    [
        (SAVED, REQUEUED, {}, "0"),
        (SAVED, PAUSED, {}, "0"),
        (None, PAUSED, {}, "0"),
        # no Run: all since the start
        (None, REQUEUED, {}, "≤3m"),
        (NO_RUN, REQUEUED, {}, "≤3m"),
        (None, REQUEUED, {"start_epoch_s": None}, "?"),
        # 20 steps since the commit, and 4 s at 2 steps/s since the rank last told
        (SAVED, None, {}, "≤28 st"),
        (SAVED, REQUEUED, {"state": JobState.SUSPENDED}, "≤28 st"),
        (replace(SAVED, save_s=60.0), REQUEUED, {}, "≤28 st"),
        (replace(SAVED, save_s=None), REQUEUED, {}, "≤28 st"),
        (STUCK, REQUEUED, {}, "≤28 st"),
        (replace(SAVED, steps_per_s=0.01), REQUEUED, {}, "≤21 st"),
        (replace(RUN, save_s=None), REQUEUED, {}, "≤128 st"),
        (replace(SAVED, step=None, save_s=None), REQUEUED, {}, "≤14s"),
        (SAVED, REQUEUED, {"state": JobState.PENDING}, "-"),
        (SAVED, REQUEUED, {"state": JobState.COMPLETED}, "-"),
    ],
)
def test_lost(
    rank: RankStatus | None, policy: SitePolicy | None, changed: dict[str, Any], words: str
) -> None:
    """0 only where nothing would be lost; else an upper bound, in steps where they are told."""
    ranks = () if rank is None else (rank,)
    loss = view(replace(job(), **changed), told(*ranks), policy=policy).loss
    assert (lost(loss) if loss is not None else "-") == words


def test_order() -> None:
    """What loses work while it cannot be saved comes first, then what failed, then what is at
    stake, what waits, and what has ended well."""
    beating = replace(SAVED, heartbeat_s=10.0)
    jobs = [
        (job(1, JobState.COMPLETED), told()),
        (job(2, JobState.PENDING), told()),
        (job(3), told(SAVED)),
        (job(4, start_epoch_s=int(NOW_S) - 9), told()),
        (job(5), told()),
        (job(6), told(STUCK)),
        (job(7, JobState.OUT_OF_MEMORY), told()),
        (job(9), told(beating)),
        (job(10), told(replace(beating, as_of=moment(-100)))),
        (job(8, JobState.SUSPENDED), told(SAVED)),
    ]
    views = tuple(view(one, ranks, policy=REQUEUED) for one, ranks in jobs)
    order = [row.job.job_id for row in View(views, NOW_S, NOW_S).rows]
    assert order == [8, 6, 7, 10, 5, 4, 3, 9, 2, 1]


def test_an_elastic_job_has_a_size(tmp_path: Path) -> None:
    """Members now, wanted and at most, and the step, as its coordinator has last said; nothing of
    what is no such file."""
    elastic = ElasticFolder(run=tmp_path)
    status = {"size": 3, "wanted": 4, "max": 8, "step": 12}
    elastic.write(elastic.status_json, status)
    first = Training(RunDir(tmp_path)).read()
    row = view(job(), first)
    assert (row.size, row.step) == ((3, 4, 8), 12)
    assert "3/4/8" in layout(TOP, [row], 80)[1][0]
    elastic.write(elastic.status_json, {**status, "size": "3"})
    assert first.read().size is None


# --- showing -------------------------------------------------------------------------------------


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
    far = replace(SAVED, step=10**6, committed_step=10**6 - 5, restart_count=12)
    times_s = (0.5, 0.5, 0.5, 0.92)
    slow = (replace(SAVED, rank=n, first_collective_s=s) for n, s in enumerate(times_s))
    size = {"size": 1000, "wanted": 2000, "max": 4096}
    rows = [
        view(job(10**6, **long), told(*slow, elastic=size)),
        view(job(8, JobState.SUSPENDED, array_job_id=5, restart_count=12), told(far)),
        view(job(9, JobState.PENDING, name="", reason=HOSTILE), told()),
    ]
    for width in range(1, 260):
        head, lines = layout(TOP, rows, width)
        assert len(lines) == len(rows)
        assert max(map(cell_len, [head, *lines])) <= width
        assert all(line.isprintable() for line in lines)
    head, _ = layout(TOP, rows[1:], 80)
    assert not {"SIZE", "SLOW"} & set(head.split())
    assert "r3 1.8x" in layout(TOP, rows, 80)[1][0]
    for title in ("JOB", "NAME", "STATE", "PARK", "STEP", "STEP/S", "AGO", "PRE", "LEFT", "LOST"):
        assert title in head.split()
    assert {column.title for column in TOP} - {""} == set(layout(TOP, rows, 259)[0].split())


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
    seen = watching.look()
    by_id = {str(row.job.id): row for row in seen.rows}
    assert set(by_id) == {"1", "2", "3_[4-9%1]"}
    assert (by_id["1"].parked, by_id["1"].n_ranks, by_id["1"].left_s) == (1, 2, 60.0)
    assert (by_id["2"].n_ranks, seen.missing) == (None, (JobId(99),))

    write(run.rank_events(1), parked(1, 60.0, rank=1))
    slurm.answer = (first, replace(job(2), state=JobState.COMPLETED))
    rows = {str(row.job.id): row.state for row in watching.look().rows}
    assert rows == {"1": "PARKED", "2": "COMPLETED"}
    slurm.answer = ControllerUnreachable("away")
    away = watching.look()
    assert {str(row.job.id): row.state for row in away.rows} == rows
    assert away.error == "away"
    slurm.answer = ()
    assert [(str(row.job.id), row.state) for row in watching.look().rows] == [("1", "FORGOTTEN")]
    slurm.answer = ControllerUnreachable("away")
    assert [row.state for row in watching.look().rows] == ["FORGOTTEN"]
    assert slurm.asked == 5


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

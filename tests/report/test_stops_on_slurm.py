"""The run folder of a training that a real Slurm has requeued and cancelled."""

from __future__ import annotations

import pytest
from clusters import Part
from processes import wait_until
from training.trainings import Training

from hydroslurm.core.events import EventKind
from hydroslurm.errors import WrongJobState
from hydroslurm.jobs.control.requests import JobAnswer, requeue_job
from hydroslurm.report.external_sources import Accounting, ExternalSources, ask_slurm
from hydroslurm.report.figures import Report
from hydroslurm.report.goodput import goodput_of
from hydroslurm.report.reading import read_history
from hydroslurm.slurm.client import JobState, open_client

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def told(
    requeue_cluster: Part, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Training, JobAnswer]:
    """A training that was stopped twice, and the answer to the first, gentle request."""
    folder = tmp_path_factory.mktemp("stops") / "job"
    training = Training(requeue_cluster, folder, epochs=1000).submit()
    training.wait_for_attempt(1)
    client = open_client(environ=requeue_cluster.environ())
    requeued = requeue_job(client, client.job(int(training.job_id)))
    with pytest.raises(WrongJobState, match="should be RUNNING"):
        requeue_job(client, client.job(int(training.job_id)))
    training.wait_for_attempt(2)
    training.slurm("scancel", training.job_id)
    wait_until(lambda: read_history(training.run.root).attempts[-1].ended, training.log())
    return training, requeued


def test_a_gentle_requeue_answers_with_the_saved_step(
    told: tuple[Training, JobAnswer],
) -> None:
    """`hydroslurm requeue` waits for the save; a second one has found no job that runs."""
    training, requeued = told
    (answer,) = requeued.answers
    assert answer.done
    assert f"step {training.attempts()[0].end_step} committed" in answer.message
    assert "as `hydroslurm requeue` does" in training.log()


def test_a_cancelled_job_is_saved_and_not_requeued(told: tuple[Training, JobAnswer]) -> None:
    """scancel: the state is committed, the job stays cancelled."""
    training, _ = told
    kinds = [event.kind for event in training.events() if event.restart_count == 1]
    assert EventKind.SAVE_COMMITTED in kinds
    assert EventKind.REQUEUE_ASKED not in kinds
    assert training.attempts()[1].ending == "cancelled"
    client = open_client(environ=training.cluster.environ())
    wait_until(
        lambda: client.job(int(training.job_id)).state is JobState.CANCELLED, "it stays cancelled"
    )


def test_stops_of_a_real_run(told: tuple[Training, JobAnswer]) -> None:
    """What the ranks really write makes complete stops, each part later than the one before."""
    training, _ = told
    history = read_history(training.run.root)
    requeued, cancelled = history.stops
    assert (requeued.missing, cancelled.missing) == ((), ())
    assert (requeued.left, cancelled.left) == ("asked", "cancelled")
    assert (requeued.attempt, cancelled.attempt) == (1, 2)
    assert (requeued.steps_lost, requeued.next_step) == (0, requeued.step)
    for stop in (requeued, cancelled):
        assert stop.staged_ms is None  # a stop writes the state itself
        parts = [stop.safe_point_ms, stop.written_ms, stop.durable_ms]
        parts += [stop.requeued_ms] if stop is requeued else []
        assert all(part is not None for part in parts)
        assert parts == sorted(parts)  # type: ignore[type-var]
    assert requeued.waited_s is not None
    assert requeued.first_step_s is not None
    assert len(history.stop_requests) >= 2

    client = open_client("commands", environ=training.cluster.child_environ())

    def known() -> Accounting | None:
        answer = ask_slurm(client, history.attempts)
        ended = [attempt.end_epoch_s for attempt in answer.attempts]
        return answer if len(ended) == 2 and all(ended) else None

    wait_until(lambda: known() is not None, "both attempts with their ends in accounting")
    sources = ExternalSources(known() or Accounting())
    assert [attempt.state for attempt in sources.accounting.attempts] == ["REQUEUED", "CANCELLED"]
    assert sources.accounting.suspend_grace_s == 2
    assert [sources.accounting.of(attempt) for attempt in history.attempts] == list(
        sources.accounting.attempts
    )
    first, _ = Report(history, sources).stops
    assert first.samples_lost == 0  # the loader told how many a step has
    parts_s = (first.eligible_s, first.queued_s, first.start_s)
    assert None not in parts_s
    assert sum(part for part in parts_s if part is not None) < 300
    goodput = goodput_of(history, sources)
    assert goodput is not None
    assert goodput.allocated_from == "slurm"
    assert goodput.allocated_s > history.observed_s - (requeued.waited_s or 0) - 2
    assert 0 < goodput.productive_s < goodput.allocated_s

"""The run folder of a training that a real Slurm has requeued and cancelled."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import wait_until
from session.training import Training

from hydroslurm.devcluster import DevCluster
from hydroslurm.report.history import read_history

pytestmark = pytest.mark.slurm


def test_stops_of_a_real_run(requeue_cluster: DevCluster, tmp_path: Path) -> None:
    """What the ranks really write makes complete stops, each part later than the one before."""
    training = Training(requeue_cluster, tmp_path / "job", epochs=1000).submit("--nodelist=n2")
    training.wait_for_life(1)
    training.slurm("scontrol", "requeue", training.job_id)
    training.wait_for_life(2)
    training.slurm("scancel", training.job_id)
    wait_until(lambda: read_history(training.run.root).lives[-1].ended, training.log())

    history = read_history(training.run.root)
    requeued, cancelled = history.stops
    assert (requeued.missing, cancelled.missing) == ((), ())
    assert (requeued.left, cancelled.left) == ("requeued", "cancelled")
    assert (requeued.life, cancelled.life) == (1, 2)
    assert (requeued.steps_lost, requeued.next_step) == (0, requeued.step)
    for stop in (requeued, cancelled):
        parts = [stop.safe_point_ms, stop.staged_ms, stop.durable_ms]
        parts += [stop.requeued_ms] if stop is requeued else []
        assert all(part is not None for part in parts)
        assert parts == sorted(parts)  # type: ignore[type-var]
    assert requeued.waited_s is not None
    assert requeued.first_step_s is not None
    assert len(history.stop_requests) >= 2

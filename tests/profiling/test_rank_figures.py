"""The profiling scripts of several ranks run and print what they promise."""

from __future__ import annotations

from pathlib import Path

import pytest
from profiling.scripts import run_script

from hydroslurm.devcluster.pytest_plugin import require_slurm


@pytest.mark.slow
def test_ranks(tmp_path: Path) -> None:
    """Two and four ranks stop behind one step, park with nothing in flight, and every arm of the
    cost of a step has a ratio."""
    result, _ = run_script("ranks.py", "--json", folder=tmp_path)
    assert result["stop_skew_steps"] == 0
    assert result["in_flight_when_parked"] == 0
    assert result["state_bytes"] > 36e6
    for world in (2, 4):
        assert result[f"committed_{world}"] == result[f"stops_{world}"] == 1
        in_order = [
            result[f"{what}_{world}_p50"]
            for what in (
                "common_step_known_ms",
                "signal_to_all_at_safe_point_ms",
                "signal_to_all_durable_ms",
            )
        ]
        assert 0 < in_order[0] < in_order[2]
        assert in_order[1] < in_order[2]
        parked_ms = [result[f"signal_to_{who}_parked_ms_{world}_p50"] for who in ("first", "all")]
        assert 0 < parked_ms[0] < parked_ms[1]
        assert result[f"resume_to_all_released_ms_{world}_p50"] > 0
    for ratio in ("per_step_cost_ratio", "per_step_cost_ratio_flag", "ratio_bare_again"):
        assert result[ratio] > 0


def test_ranks_scale(tmp_path: Path) -> None:
    """What thousands of ranks cost their coordinator, on a small scale."""
    result, _ = run_script("ranks_scale.py", "--json", folder=tmp_path)
    for phase in ("join", "agree", "pause", "commit", "tell", "stop", "leave"):
        assert result[f"{phase}_s_128"] > 0
    assert result["growth_exponent"] < 1.6


@pytest.mark.slurm
@pytest.mark.slow
def test_long_suspend(tmp_path: Path) -> None:
    """On a real Slurm ranks that were suspended for longer than the time-out of their collectives
    go on, with DDP and with FSDP2, and none was held inside of one."""
    require_slurm()
    result, _ = run_script("long_suspend.py", "--json", folder=tmp_path)
    assert result["suspended_s"] > result["collective_timeout_s"]
    assert result["continued_ddp"] == result["rounds_ddp"] == 1
    assert result["continued_fsdp"] == result["rounds_fsdp"] == 1
    assert result["all_parked"] == 2
    assert result["in_flight_ranks"] == 0
    assert result["rounds_without"] == 1
    assert result["resume_command_to_all_trained_s_p50"] > 0

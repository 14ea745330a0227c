"""The profiling scripts run and print what they promise; how fast they find it is not tested."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from profiling.scripts import PROFILING, run_script

from hydroslurm.devcluster.pytest_plugin import require_slurm

sys.path.insert(0, str(PROFILING))

import harness
import readme_table


def test_overhead() -> None:
    """Every arm has a ratio for both models, and the native gate sees far more points."""
    result, before = run_script("overhead.py")
    for arm in ("installed", "marks", "bare_again", "fallback", "module_hooks"):
        both = [result[f"ratio_{arm}_{name}"] for name in ("mlp", "transformer")]
        assert all(ratio > 0 for ratio in both)
        assert result[f"ratio_{arm}"] == max(both)
    assert result["gate_points_per_step_native"] > 10 * result["gate_points_per_step_hooks"] > 0
    assert before


def test_pause_latency() -> None:
    """Both ways were paused and resumed, and ours was held inside the long backward."""
    result, before = run_script("pause_latency.py", "--json")
    assert before == []
    assert result["pauses"] == 6
    for key in ("pause_us_p50", "pause_us_p99", "resume_us_p50", "resume_us_p99"):
        assert result[key] > 0
        assert result[f"incumbent_{key}"] > 0
    assert result["pause_us_p50"] <= result["pause_us_p99"]
    assert 0 < result["handler_us_p50"] < result["pause_us_p99"]
    assert 0 < result["floor_us_p50"] <= result["floor_us_p99"]
    assert result["pause_above_floor_us_p50"] < result["pause_us_p50"]
    assert result["parked_inside_backward"] == 1.0
    assert result["incumbent_parked_inside_backward"] == 0.0


def test_report_speed() -> None:
    """Both made-up runs are reported whole: every pause and every requeue of theirs is found."""
    result, _ = run_script("report_speed.py", "--json")
    assert result["pauses"] == 8 * 3 * 50
    assert result["requeues"] == 2
    assert result["events"] > 8 * 3 * 50 * 5
    assert result["report_events"] > 4 * 2 * 8 * 5
    for key in ("report_s_50_pauses", "report_s_1m_events", "report_peak_mb_1m_events"):
        assert result[key] > 0
    for key in ("report_wall_s", "report_cpu_s", "report_peak_mb"):
        assert result[key] > 0


def test_fused_modules() -> None:
    """Norms, attention and GELU are all found, and equal."""
    result, _ = run_script("fused_modules.py", "--json")
    assert result["modules"] == 17
    assert 0 < result["modules_replaced"] <= 17
    assert result["largest_difference"] < 1e-5
    for key in ("step_ratio", "again_ratio", "model_ratio", "step_ms", "speedup_newgelu"):
        assert result[key] > 0


def test_launch_ahead() -> None:
    """Each bound holds, but for a slice of it and a kernel, the largest of 1.5 ms; none holds
    without one."""
    result, _ = run_script("launch_ahead.py", "--json")
    for bound_ms in (5, 20, 50):
        assert 0 < result[f"most_queued_ms_{bound_ms}"] <= bound_ms * 9 / 8 + 1.5
        assert result[f"throughput_ratio_{bound_ms}"] > 0
    assert result["most_queued_ms_0"] > 50


def test_built_runs() -> None:
    """Every rank of the made-up jobs is seen."""
    result, _ = run_script("built_runs.py", "--json")
    assert (result["jobs"], result["ranks"]) == (20, 8)
    assert result["top_looks_until_complete"] == 1
    assert result["list_ms_per_job"] > 0
    assert result["top_cpu_s"] >= 0  # counted in ticks of 10 ms: a look at 20 jobs may take none


@pytest.mark.slurm
@pytest.mark.slow
def test_storm() -> None:
    """Jobs that are preempted or requeued together ask little, and nothing of accounting: what a
    requeue by hand needs, and one question and the requeue for a preemption."""
    require_slurm()
    result, _ = run_script("storm.py", "--json")
    assert result["rpcs_per_stop"] <= 2
    assert result["sacct_per_stop"] == 0
    assert 0 < result["rpcs_per_start_alone"] <= 3
    assert result["storm_1000_s"] > 0


@pytest.mark.slurm
@pytest.mark.slow
def test_suspend_latency() -> None:
    """A job on a real Slurm parks before SIGSTOP at every suspend, and runs after every resume."""
    require_slurm()
    result, _ = run_script("suspend_latency.py", "--json")
    assert result["suspends"] == 2
    assert result["parked_before_sigstop"] == 1.0
    assert result["command_to_parked_ms_p50"] > 0
    assert result["resume_command_to_running_ms_p50"] > 0


def test_gpu_check_without_a_gpu() -> None:
    """Where there is no GPU it says so and succeeds."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result, before = run_script("gpu_check.py")
    assert result["gpu"] is None
    assert "no CUDA device" in before[0]


@pytest.mark.gpu
@pytest.mark.slow
def test_gpu_check() -> None:
    """On a GPU every part gives a figure, and pauses change no bit."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    result, _ = run_script("gpu_check.py", "--json")
    assert result["drained"] == 1.0
    assert result["bit_identical_with_pauses"] == result["bit_identical_without_pauses"]
    assert result["pause_to_drained_ms_p50"] > 0


def test_bench_keeps_results_and_spares_readme(tmp_path: Path) -> None:
    """A quick bench writes the results where it is told, marked as quick, and changes no page."""
    readme = (PROFILING.parent / "README.md").read_bytes()
    argv = [sys.executable, str(PROFILING / "bench.py"), "--quick", "--only", "gpu_check"]
    subprocess.run(
        [*argv, "--out", str(tmp_path)], check=True, timeout=400, stdout=subprocess.DEVNULL
    )
    assert [path.name for path in tmp_path.iterdir()] == ["gpu_check.json"]
    assert readme_table.load(tmp_path) == {}
    assert (PROFILING.parent / "README.md").read_bytes() == readme


def test_percentiles_are_values_that_were_seen() -> None:
    """Nearest rank: the median of four is the second, the 99th percentile of few is the largest."""
    assert harness.percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.0
    assert harness.percentile([4.0, 1.0, 3.0, 2.0], 99) == 4.0
    assert harness.median_ratio({"a": [2.0, 6.0, 3.0], "b": [1.0, 2.0, 3.0]}, "a", "b") == 2.0


def test_elastic_sim() -> None:
    """Up to 1,000 members in a storm: nobody is lost, and the messages of a change grow at most as
    n log n, which is 10 ** 1.176 from 100 to 1,000."""
    result, _ = run_script("elastic_sim.py", "--json", "--quick")
    assert (result["members_lost"], result["split_brains"]) == (0, 0)
    assert result["messages_growth_exponent"] <= 1.176
    assert result["growth_exponent"] < 2
    assert result["storm_generations"] > result["storms"] == 3


def test_the_table_has_a_line_per_figure_and_says_where_it_was_measured() -> None:
    """Figures, goals and the incumbent's come from the results; what was not measured is absent."""
    where = {"date": "2025-01-31", "cpu_count": 2, "cpu_model": "X", "python": "3.11", "torch": "2"}
    results = {
        "pause_latency": {
            "pause_us_p50": 61.04,
            "incumbent_pause_us_p50": 912.0,
            "parked_inside_backward": 1.0,
            "environment": where,
        }
    }
    lines = readme_table.table(results).splitlines()
    assert lines[2] == (
        "| kill → first operator held, median | 61.04 µs | ≤ 40 | 912 µs | `pause_latency.py` |"
    )
    assert len(lines) == 6
    assert lines[-1] == "Measured 2025-01-31 on 2 cores of X, Python 3.11, torch 2."


def test_only_what_is_between_the_markers_is_replaced() -> None:
    """The rest of a page stays as it is, and a page without the markers is refused."""
    begin, end = readme_table.BEGIN, readme_table.END
    text = f"before\n{begin}\nold\n{end}\nafter\n"
    assert readme_table.replace_between(text, "new") == f"before\n{begin}\nnew\n{end}\nafter\n"
    with pytest.raises(ValueError, match="wanted one"):
        readme_table.replace_between("no markers", "new")


@pytest.mark.slurm
@pytest.mark.slow
def test_startup() -> None:
    """Every start has a figure, and its peer or its noise beside it."""
    require_slurm()
    result, _ = run_script("startup.py", "--json")
    for key in ("python_start_ratio", "python_start_ratio_bare_again", "python_start_ms", "help_s"):
        assert result[key] > 0
    assert result["submit_to_first_operator_s"] > 0
    assert result["sbatch_to_first_operator_s"] > 0
    assert result["submit_ratio_to_sbatch"] > 0
    assert result["first_step_ratio_to_bare"] > 0
    assert (result["starts"], result["submissions"]) == (10, 1)

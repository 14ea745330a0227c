"""The profiling script of saves runs and prints what it promises."""

from __future__ import annotations

from pathlib import Path

from profiling.scripts import run_script


def test_save(tmp_path: Path) -> None:
    """Every figure is there and positive, and nothing is left in the folder."""
    result, _ = run_script("save.py", "--json", "--directory", str(tmp_path))
    assert 10e6 < result["state_bytes.0.016gb"] < 20e6
    for key in (
        "save_ratio_to_disk",
        "torch_save_ratio_to_disk",
        "stall_ratio_to_memcpy",
        "stop_to_durable_ms",
        "first_stall_ratio_to_memcpy",
        "first_stall_early_ratio_to_memcpy",
        "first_touch_ratio_to_memcpy",
        "stop_peak_ratio_to_state",
        "save_ratio_to_best_peer",
        "load_ratio_to_best_peer",
        "load_ratio_to_plain_read",
        "load_cpu_s_per_gb",
    ):
        assert result[f"{key}.0.016gb"] > 0
    assert result["commit_cpu_s_512"] > 0
    assert result["commit_gil_held_ms_512"] > 0
    assert list(tmp_path.iterdir()) == []

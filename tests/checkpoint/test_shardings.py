"""What 4 ranks have saved is loaded by 1, 2, 3 and 4, bit for bit."""

from __future__ import annotations

from pathlib import Path

from zygote import forked_program

PROGRAM = Path(__file__).with_name("shardings.py")


def test_with_another_number_of_ranks(quick_folder: Path) -> None:
    """Model and optimizer come back whole and in shards of any layout, and train on: DDP, FSDP with
    uneven shards, HSDP, and FSDP over tensor parallel ranks."""
    with forked_program(PROGRAM, quick_folder, str(quick_folder)) as program:
        program.expect("done", limit_s=240)
        assert program.wait() == 0, str(program)
    said = [line for line in program.lines if "loaded by" in line]
    cases = ("ddp", "uneven", "hsdp", "fsdp_tp")
    assert said == [f"{case} loaded by {ranks}" for case in cases for ranks in (1, 2, 3, 4)]

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
    assert [line.split()[0] for line in said] == (
        ["ddp"] * 2 + ["uneven"] * 4 + ["hsdp"] * 2 + ["fsdp_tp"] * 2
    )

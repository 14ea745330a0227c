"""attempts.jsonl: what is written, what a kill may tear, and when a run must not go on."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from hydroslurm.core.rundir import ATTEMPT_ENV, ATTEMPTS_ENV, SUPERVISED_ENV
from hydroslurm.errors import RunEnded, RunFolderError, UsageError
from hydroslurm.jobs.supervisor.attempts import Attempts
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.training.attempts import (
    AttemptLog,
    AttemptRecord,
    Limits,
    check_limits,
    least_number,
    limits_of,
    losses,
)
from hydroslurm.training.cadence import Cadence


def test_what_was_begun_and_ended_is_read_back(tmp_path: Path) -> None:
    """An attempt without an end stays one that died."""
    log = AttemptLog(tmp_path / "attempts.jsonl")
    assert log.attempts() == ()
    first = log.begin(0, now_epoch_ns=5, job_id=7, restart_count=0)
    log.end(first, "preempted", step=12, now_epoch_ns=6)
    assert log.begin(12, now_epoch_ns=7, job_id=7, restart_count=1) == 2
    assert log.attempts() == (
        AttemptRecord(1, 5, 0, "preempted", 12, 6),
        AttemptRecord(2, 7, 12),
    )
    (tmp_path / "other.jsonl").mkdir()
    with pytest.raises(RunFolderError, match=r"other\.jsonl"):
        AttemptLog(tmp_path / "other.jsonl").attempts()


@pytest.mark.parametrize(
    ("limits", "attempts", "said"),
    [
        # each cause has its own budget; the message says what was counted
        (Limits(preemptions=2), ["preempted 0", "requeued 5", "asked 9"], "3 preem"),
        (Limits(time_limits=0), ["time_limit 0", "dead 5"], "1 time limits"),
        (Limits(failures=1), ["dead 0", "error 5"], "2 failures"),
        (Limits(attempts_without_progress=2), ["preempted 0", "dead 9", "dead 9"], "step 9"),
        # preemptions are without limit by default, and no cause uses up another's budget
        (Limits(failures=1), ["preempted 0", "requeued 5", "dead 7"], ""),
        (Limits(preemptions=1), ["time_limit 0", "preempted 5", "dead 7"], ""),
        (Limits(attempts_without_progress=2), ["dead 9", "dead 0", "dead 9"], ""),
        (Limits(attempts_without_progress=1), ["cancelled 9"], ""),
        (Limits(), [f"preempted {n}" for n in range(9)], ""),
    ],
)
def test_a_spent_limit_ends_the_run(limits: Limits, attempts: list[str], said: str) -> None:
    """At step 9, by how the attempts have ended and where they had begun."""
    made = []
    for number, one in enumerate(attempts, 1):
        ending, step = one.split()
        ended = None if ending == "dead" else ending
        made.append(AttemptRecord(number, 0, int(step), ending=ended))  # type: ignore[arg-type]
    spent = pytest.raises(RunEnded, match=said) if said else contextlib.nullcontext()
    with spent:
        check_limits(tuple(made), limits, step=9)


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([], (0, 0.0)),
        (["0 0"], (0, 90.0)),
        (["0 0 died"], (0, 90.0)),  # by no means certain: it is the present one
        # each began at that second and step, and ended at those; the last one runs until second 90
        (["0 0 preempted 30 50", "60 50"], (0, 60.0)),
        (["0 0 preempted 30 50", "60 40"], (1, 60.0)),  # its last save was not in time
        (["0 0 error 30 50", "60 40"], (1, 60.0)),
        (["0 0 cancelled 30 50", "60 0"], (0, 60.0)),  # begun anew
        (["0 0 died", "60 0 died", "80 0"], (2, 90.0)),
    ],
)
def test_what_lost_work_is_counted(history: list[str], expected: tuple[int, float]) -> None:
    """A death, or a next attempt that resumes from before the last step; a stop that saved not."""
    made = []
    for number, one in enumerate(history, 1):
        began_s, step, *rest = one.split()
        ending, ended_s, end_step = rest if len(rest) == 3 else (None, 0, None)
        made.append(
            AttemptRecord(
                number,
                int(began_s) * 10**9,
                int(step),
                ending=ending,
                end_step=None if end_step is None else int(end_step),
                ended_epoch_ns=int(ended_s) * 10**9,
            )
        )
    assert losses(made, now_epoch_ns=90 * 10**9) == expected


@pytest.mark.parametrize(
    ("measured", "every_s", "words"),
    [
        # sqrt(2 * 0.8 s * 48,000 s) = 277 s
        (
            {"stall_s": 0.8, "save_s": 12, "losses": 3, "ran_s": 144_000},
            277.1,
            "work in 40 h: 3 (a stop",
        ),
        (
            {"stall_s": 0.8, "save_s": 12, "losses": 1, "ran_s": 144_000},
            480.0,
            "a save every 480 s",
        ),
        (
            {"stall_s": 8.0, "save_s": 12, "losses": 3, "ran_s": 144_000},
            600.0,
            "every_s=600 bounds it",
        ),
        (
            {"stall_s": 0.001, "save_s": 12, "losses": 9, "ran_s": 4_000},
            120.0,
            "stalls the training 0.001 s",
        ),
        (
            {"stall_s": 0.8, "save_s": 12, "losses": 0, "ran_s": 144_000},
            600.0,
            "work in 40 h: 0",
        ),
        ({"losses": 3, "ran_s": 144_000}, 600.0, "a save every 600 s"),
    ],
)
def test_the_time_between_saves(measured: dict[str, Any], every_s: float, words: str) -> None:
    """Young's optimum of what was measured, a tenth of the time writing at most, and every_s."""
    cadence = Cadence(every_s=600, **measured)
    assert cadence.interval_s == pytest.approx(every_s, rel=1e-3)
    assert words in cadence.reason()
    assert Cadence.of({"cadence": asdict(cadence)}) == cadence
    assert replace(cadence, every_s=0).interval_s == 0


@pytest.mark.parametrize("meta", [None, [], {"cadence": 3}, {"cadence": {"stall_s": -1}}])
def test_a_forged_cadence_counts_for_nothing(meta: object) -> None:
    """What is read from a manifest is checked: a negative time would end the training."""
    assert Cadence.of(meta) == Cadence()


def test_the_environment_has_its_say_about_limits() -> None:
    """A spec's attemptsWithoutProgress counts above the script's; a supervised run counts no
    failures unless its script says so."""
    assert limits_of(None, {}) == Limits()
    assert limits_of(None, {SUPERVISED_ENV: "1"}) == Limits(failures=None)
    assert limits_of(Limits(failures=3), {SUPERVISED_ENV: "1", ATTEMPTS_ENV: "9"}) == Limits(
        failures=3, attempts_without_progress=9
    )
    for options in ({"failures": -1}, {"attempts_without_progress": 0}):
        with pytest.raises(UsageError, match="wanted a whole number"):
            Limits(**options)
    with pytest.raises(UsageError, match="HYDROSLURM_ATTEMPTS_WITHOUT_PROGRESS='many'"):
        limits_of(None, {ATTEMPTS_ENV: "many"})


def test_numbers_are_those_of_the_job(tmp_path: Path) -> None:
    """An attempt that was killed before it had a Run is counted by the supervisor, or by Slurm."""
    slurm = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    allocation = Allocation.from_environ(slurm)
    assert least_number({}, None) == 1
    assert least_number({}, allocation) == 3
    assert least_number({ATTEMPT_ENV: "5"}, allocation) == 5
    assert least_number({ATTEMPT_ENV: "x"}, None) == 1
    log = AttemptLog(tmp_path / "attempts.jsonl")
    moment = {"now_epoch_ns": 1, "job_id": 7, "restart_count": 0}
    assert [log.begin(0, **moment, at_least=least) for least in (1, 3, 3)] == [1, 3, 4]


def test_starts_at_one_moment_take_different_numbers(tmp_path: Path) -> None:
    """Of a Run and of a supervisor, each with the file as it is then."""
    runs, starts = tmp_path / "attempts.jsonl", tmp_path / "starts.jsonl"
    together = Barrier(8)

    def begin(_: int) -> tuple[int, int]:
        together.wait()
        number = AttemptLog(runs).begin(0, now_epoch_ns=1, job_id=7, restart_count=0)
        return number, Attempts(starts).begin(0).number

    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(begin, range(8)))
    for of_one_kind in zip(*numbers, strict=True):
        assert len(set(of_one_kind)) == 8, of_one_kind

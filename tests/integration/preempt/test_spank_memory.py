"""The SPANK plugin under AddressSanitizer and UBSan, driven as Slurm drives it, bad arguments
first: a fault of it would be a fault of srun, sbatch and slurmstepd."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import captured

from hydroslurm.slurm.spank.build import source_text

DRIVER = Path(__file__).with_name("spank_driver.c")
FORWARDED = "SLURM_SPANK__SLURM_SPANK_OPTION_hydroslurm_preempt"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spank")
    (folder / "plugin.c").write_text(source_text())
    made = folder / "driver"
    words = ["cc", "-std=c11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Wextra", "-Werror"]
    words += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    words += [*os.environ.get("SPANK_INCLUDE", "").split(), "-o", str(made)]
    done = captured([*words, folder / "plugin.c", DRIVER], timeout=120)
    assert done.returncode == 0, done.stderr
    return made


def drive(driver: Path, *words: str, **environ: str) -> tuple[list[str], str]:
    asked = {"ASAN_OPTIONS": "detect_leaks=1", **environ}
    done = captured([driver, *words], env=asked, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("context", ["local", "allocator"])
@pytest.mark.parametrize("bad", ["=Pause", "=pause ", "=" + "x" * 100_000, "=\x01", "=%s%n"])
def test_a_bad_value_is_refused_with_our_words(driver: Path, context: str, bad: str) -> None:
    """The message says what was wanted, and is short whatever was given."""
    out, told = drive(driver, context, bad)
    assert out == ["refused", "process -", "task -"]
    assert '"pause"' in told
    assert '"requeue"' in told
    assert len(told) < 400


@pytest.mark.parametrize("context", ["local", "allocator"])
@pytest.mark.parametrize(
    ("option", "mode"),
    [("bare", "pause"), ("=", "pause"), ("=(null)", "pause"), ("=requeue", "requeue")],
)
def test_submission_sets_its_own_environment(
    driver: Path, context: str, option: str, mode: str
) -> None:
    """Which is what the job inherits. Slurm 22.05 writes an option without argument as (null)."""
    assert drive(driver, context, option)[0] == [f"process {mode}", "task -"]


@pytest.mark.parametrize(
    ("option", "variables", "task"),
    [
        ("none", [], "-"),
        ("=bogus", [], "-"),
        ("=requeue", [], "requeue"),
        ("bare", ["HYDROSLURM_PREEMPT=requeue"], "pause"),
        ("=pause", ["HYDROSLURM_PREEMPT=No"], "No"),
        ("none", [f"{FORWARDED}=(null)"], "pause"),
        ("none", [f"{FORWARDED}=nonsense"], "-"),
        ("none", [f"{FORWARDED}={'y' * 1000}"], "-"),
        ("=pause", ["HYDROSLURM_PREEMPT=" + "z" * 1000], "pause"),
    ],
)
def test_tasks(driver: Path, option: str, variables: list[str], task: str) -> None:
    """The option of srun, that of sbatch in the batch script, and the word that wins over both. In
    slurmstepd nothing is refused any more."""
    assert drive(driver, "remote", option, *variables)[0] == ["process -", f"task {task}"]


@pytest.mark.parametrize(
    ("option", "variables", "step", "pauses"),
    [
        ("=pause", [], "0", "held"),
        ("none", ["HYDROSLURM_PREEMPT=requeue"], "7", "held"),
        ("none", [f"{FORWARDED}=(null)"], "0xfffffffb", "free"),
        ("none", ["HYDROSLURM_PREEMPT=pause"], "0xfffffffa", "free"),
        ("=pause", ["HYDROSLURM_PREEMPT=off"], "0", "free"),
        ("none", ["HYDROSLURM_PREEMPT=nonsense"], "0", "free"),
    ],
)
def test_who_holds_pauses(
    driver: Path, option: str, variables: list[str], step: str, pauses: str
) -> None:
    """Tasks that are to be preemptible, however that was said; no batch script and no shell of an
    interactive job step."""
    assert drive(driver, "remote", option, *variables, DRIVER_STEP=step)[0][-1] == pauses


def test_off_and_elsewhere(driver: Path) -> None:
    """One srun inside sbatch --preempt can go without; slurmd, prolog and epilog load it too."""
    out, _ = drive(driver, "local", "=pause", HYDROSLURM_PREEMPT="off")
    assert out == ["process off", "task -"]
    for context in ("slurmd", "script"):
        assert drive(driver, context, "none")[0] == ["process -", "task -"]


@pytest.mark.parametrize("refusal", ["DRIVER_REFUSES_OPTION", "DRIVER_REFUSES_ENV"])
def test_what_slurm_refuses_fails_nothing(driver: Path, refusal: str) -> None:
    """The job runs as if there were no plugin; the log says why."""
    out, told = drive(driver, "remote", "=pause", **{refusal: "1"})
    assert out[-1] == "task -"
    assert "hydroslurm" in told

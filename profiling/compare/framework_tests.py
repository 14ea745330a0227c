"""Run the frameworks' own tests of training, resuming and signals: as they come, and once more with
hydroslurm in every process, as ``srun --preempt`` has it. The same tests are to pass.

    git clone --depth 1 --branch 2.6.6 https://github.com/Lightning-AI/pytorch-lightning S/lightning
    git clone --depth 1 --branch v5.23.0 https://github.com/huggingface/transformers S/transformers
    git clone --depth 1 --branch v1.15.0 https://github.com/huggingface/accelerate S/accelerate
    python profiling/compare/framework_tests.py S
    python profiling/compare/framework_tests.py S --only lightning -k signal

The folder has the frameworks' sources, of the versions that are installed; wheels bring no tests.
A framework without a folder is left out, with a word. A test whose outcome differs is run again
both ways, alone: what agrees then was chance, and is counted as such. What has to differ is listed
in framework_plugin.py with reasons.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness import finish, parser

from hydroslurm.core.rundir import RUN_DIR_ENV
from hydroslurm.runtime.autoload import PREEMPT_ENV

LIMIT_S = 3600.0


@dataclass(frozen=True)
class Suite:
    """The tests of one framework.

    Attributes:
        folder: below its sources, from which they are run.
        tests: files below that.
        older: those of older versions, whose files have other names.
    """

    folder: str
    tests: tuple[str, ...]
    older: tuple[str, ...] = ()

    def there(self, folder: Path) -> tuple[str, ...]:
        """The files of the version that this folder is of; none if there is no such version."""
        versions = (self.tests, self.older)
        return next((one for one in versions if all((folder / test).is_file() for test in one)), ())


SUITES = {
    "lightning": Suite(
        "tests",
        (
            "tests_pytorch/utilities/test_auto_restart.py",
            "tests_pytorch/trainer/connectors/test_signal_connector.py",
            "tests_pytorch/trainer/connectors/test_checkpoint_connector.py",
            "tests_pytorch/loops/test_loops.py",
            "tests_pytorch/loops/test_progress.py",
            "tests_pytorch/loops/test_loop_state_dict.py",
            "tests_pytorch/loops/test_training_epoch_loop.py",
            "tests_pytorch/loops/test_fetchers.py",
            "tests_fabric/plugins/environments/test_slurm.py",
        ),
    ),
    "transformers": Suite(
        ".",
        (
            "tests/trainer/test_trainer_checkpointing.py",
            "tests/trainer/test_trainer_resume.py",
            "tests/trainer/test_trainer_jit_checkpoint.py",
            "tests/trainer/test_trainer_callback.py",
            "tests/trainer/test_trainer_data.py",
            "tests/trainer/distributed/test_trainer_distributed_ddp.py",
        ),
        older=(
            "tests/trainer/test_trainer_jit_checkpoint.py",
            "tests/trainer/test_trainer_callback.py",
            "tests/trainer/test_trainer.py",
        ),
    ),
    "accelerate": Suite(
        ".",
        (
            "tests/test_state_checkpointing.py",
            "tests/test_data_loader.py",
            "tests/test_grad_sync.py",
        ),
    ),
}


def main() -> None:
    made = parser("The frameworks' own tests, with hydroslurm and without.")
    made.add_argument("sources", type=Path, help="the folder with the frameworks' sources")
    made.add_argument("--only", choices=sorted(SUITES), action="append", help="may be given again")
    made.add_argument("-k", dest="some", default="", help="pytest's")
    chosen = made.parse_args()
    figures: dict[str, Any] = {"left_out": []}
    for name, suite in SUITES.items():
        if chosen.only and name not in chosen.only:
            continue
        folder = (chosen.sources / name / suite.folder).resolve()
        tests = suite.there(folder)
        if not tests:
            missing = [test for test in suite.tests if not (folder / test).is_file()]
            print(f"{name} is left out: {folder} has no {', '.join(missing)}", file=sys.stderr)
            figures["left_out"].append(name)
            continue
        tests = tests[:1] if chosen.quick else tests
        figures |= compare(name, folder, tests, some=chosen.some)
    finish(chosen, "The frameworks' own tests", figures)


def compare(name: str, folder: Path, tests: tuple[str, ...], *, some: str) -> dict[str, Any]:
    """The figures of one framework."""
    options = ("-k", some) if some else ()
    bare, ours = (outcomes(folder, tests, options, preempt=way) for way in ("off", "requeue"))
    found = differing(bare, ours)
    differ = []
    for test in found:  # alone: what ran before it does not count
        again = [outcomes(folder, (test,), (), preempt=way) for way in ("off", "requeue")]
        if differing(*again):
            differ.append(test)
    return {
        f"{name}_version": importlib.metadata.version(name),
        f"{name}_tests": len(bare),
        f"{name}_passed_bare": count(bare, "passed"),
        f"{name}_passed_with_hydroslurm": count(ours, "passed"),
        f"{name}_skipped": count(bare, "skipped"),
        f"{name}_different_on_purpose": count(ours, "expected"),
        f"{name}_differ": differ,
        f"{name}_differed_once": [test for test in found if test not in differ],
    }


def differing(bare: dict[str, str], ours: dict[str, str]) -> list[str]:
    """The tests with two outcomes, or that only one run has; without those that have to differ."""
    return sorted(
        test
        for test in bare | ours
        if bare.get(test) != ours.get(test) and ours.get(test) != "expected"
    )


def count(found: dict[str, str], wanted: str) -> int:
    return sum(outcome == wanted for outcome in found.values())


def outcomes(
    folder: Path, tests: tuple[str, ...], options: tuple[str, ...], *, preempt: str
) -> dict[str, str]:
    """What became of each test, by its id."""
    with tempfile.TemporaryDirectory(prefix="hydroslurm-framework-tests-") as scratch:
        report = Path(scratch) / "report.xml"
        ours = () if preempt == "off" else ("-p", "framework_plugin")
        path = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            [
                sys.executable, "-m", "pytest", "-q", "--timeout=300", "-p", "no:cacheprovider",
                "-p", "no:hydroslurm", f"--rootdir={folder}",
                "-o", "junit_family=xunit1", f"--junitxml={report}",
                *ours, *options, *tests,
            ],
            cwd=folder,
            env={
                **os.environ,
                PREEMPT_ENV: preempt,
                RUN_DIR_ENV: f"{scratch}/run",
                "OMP_NUM_THREADS": "1",
                "TMPDIR": scratch,
                "PYTHONPATH": os.pathsep.join(filter(None, path)),
            },
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        if not report.exists():
            raise SystemExit(f"pytest in {folder} ended with {done.returncode}:\n{done.stdout}")
        found = dict(map(_outcome, ElementTree.parse(report).iter("testcase")))
        if not count(found, "passed") and len(tests) > 1:
            raise SystemExit(f"none of the tests in {folder} passed:\n{done.stdout[-4000:]}")
        return found


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    found = next((kinds[child.tag] for child in case if child.tag in kinds), "passed")
    if any(child.get("type") == "pytest.xfail" for child in case):
        found = "expected"
    module = case.get("file", "")
    inner = case.get("classname", "").removeprefix(module.removesuffix(".py").replace("/", "."))
    return "::".join(filter(None, (module, inner.strip("."), case.get("name", "")))), found


if __name__ == "__main__":
    main()

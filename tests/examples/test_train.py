"""Each training of examples/ stands alone under any name; a pause or a stop costs it no bit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import free_port, wait_until

from hydroslurm.runtime import client

LIMIT_S = 300


def start(script: Path, *options: str, ranks: int = 1) -> list[subprocess.Popen[bytes]]:
    """The script in its folder; what all ranks print is added to the file ``log``."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("SLURM_")}
    environ |= {"OMP_NUM_THREADS": "1", "HYDROSLURM_PREEMPT": "requeue"}
    environ["HYDROSLURM_RUN_DIR"] = str(script.parent / "run")
    if ranks > 1:
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        environ["GLOO_SOCKET_IFNAME"] = "lo"
    processes = []
    for rank in range(ranks):
        number = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        with (script.parent / "log").open("ab") as log:
            command = [sys.executable, script.name, *options]
            processes.append(
                subprocess.Popen(
                    command, cwd=script.parent, stdout=log, stderr=log, env=environ | number
                )
            )
    return processes


def ended(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    try:
        return [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def copied(root: Path, name: str, folder: Path) -> Path:
    """The example as ``train.py`` in a folder of its own."""
    folder.mkdir()
    return Path(shutil.copy(root / "examples" / name, folder / "train.py"))


@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        ("train_run.py", 1, ["--epochs=4", "--log-every=10"]),
        ("train_ddp.py", 2, ["--epochs=3", "--log-every=10"]),
        ("train_lightning.py", 1, ["--epochs=3"]),
        ("train_huggingface.py", 1, ["--epochs=1"]),
    ],
)
def test_stopped_and_started_again(
    name: str, ranks: int, options: list[str], root: Path, tmp_path: Path
) -> None:
    """SIGTERM after some steps ends every rank with 75; the same command then trains to the same
    last lines as a training that nobody stopped."""
    alone, stopped = (copied(root, name, tmp_path / folder) for folder in ("alone", "stopped"))
    assert ended(start(alone, *options, ranks=ranks)) == [0] * ranks, alone.with_name(
        "log"
    ).read_text()
    log = stopped.with_name("log")
    first = start(stopped, *options, *_slowly(name), ranks=ranks)
    wait_until(lambda: re.search(r"step 10\b|'loss'", log.read_text()), "a step", limit_s=LIMIT_S)
    for process in first:
        process.terminate()
    assert ended(first) == [os.EX_TEMPFAIL] * ranks, log.read_text()
    assert ended(start(stopped, *options, ranks=ranks)) == [0] * ranks, log.read_text()
    result = r"^(?:accuracy|weights sha256|trained) .*$"
    seen = re.findall(result, log.read_text(), flags=re.M)
    assert seen
    assert seen == re.findall(result, alone.with_name("log").read_text(), flags=re.M)
    assert "resumes from step" in log.read_text()


def _slowly(name: str) -> list[str]:
    return [] if name == "train_huggingface.py" else ["--think-s=0.05"]


def test_pauses_do_not_change_the_weights(root: Path, tmp_path: Path) -> None:
    """The ordinary script, paused by its pid again and again, and once without hydroslurm."""
    plain, paused = (copied(root, "train.py", tmp_path / folder) for folder in ("plain", "paused"))
    (plain.parent / "hydroslurm.py").write_text("raise ImportError('hydroslurm was imported')")
    plain_run = start(plain, "--iterations=240")
    (process,) = start(paused, "--iterations=240", "--log-every=1", "--pausable")
    log = paused.with_name("log")
    for count in (3, 40, 80):
        wait_until(lambda count=count: log.read_text().count("step ") >= count, f"{count} steps")
        assert client.pause(process.pid).done
        assert client.resume(process.pid).done
    assert ended([process, *plain_run]) == [0, 0], log.read_text()
    last = plain.with_name("log").read_text().splitlines()[-2:]
    assert re.fullmatch(r"accuracy 9\d\.\d+% on 360 test images", last[0])
    assert log.read_text().splitlines()[-2:] == last

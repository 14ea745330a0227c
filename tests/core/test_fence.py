"""The claim on a run folder: who holds it, what a kill or a stranger's hand may leave of it."""

from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hydroslurm.core.fence import Fence, process_began_epoch_s
from hydroslurm.errors import RunFolderError, StaleAttempt


def attempt(folder: Path, restart: int = 0, *, job: int = 7, began_s: float = 0.0) -> Fence:
    """One of a job whose attempts begin ``began_s`` seconds after this process did."""
    fence = Fence(folder / "claim.json", cluster="c", job_id=job, restart_count=restart)
    began = process_began_epoch_s() + began_s
    fence.me = dataclasses.replace(fence.me, began_epoch_s=began)
    return fence


def test_a_newer_attempt_ends_the_older_one(tmp_path: Path) -> None:
    """The older one is told who holds the folder; a rank that was told of the claim is let pass."""
    old, new = attempt(tmp_path), attempt(tmp_path, 1, began_s=60)
    old.claim()
    old.check("a save")
    claim = json.loads(json.dumps(new.claim()))
    with pytest.raises(StaleAttempt, match=r"the save of step 5 .* job 7, restart 1 .* job 7, res"):
        old.check("the save of step 5")
    new.check("a save")
    other_rank = attempt(tmp_path, 1, began_s=61)
    other_rank.hold(claim)
    other_rank.check("a save")


@pytest.mark.parametrize(("before", "job"), [(2, 8), (0, 7), (2, 7), (2, 0)])
def test_who_comes_later_is_newer(before: int, job: int, tmp_path: Path) -> None:
    """A fresh job on the same folder, new processes in one job, also where SLURM_RESTART_COUNT was
    lost, and attempts without any job."""
    old, new = attempt(tmp_path, before), attempt(tmp_path, job=job, began_s=9)
    old.claim()
    new.claim()
    new.check("a save")
    with pytest.raises(StaleAttempt):
        old.check("a save")


def test_a_dead_attempt_that_comes_late_is_refused(tmp_path: Path) -> None:
    """A process of the job's first start that was held up, and claims or acts after the second."""
    late, living = attempt(tmp_path), attempt(tmp_path, 1, began_s=60)
    living.claim()
    with pytest.raises(StaleAttempt, match="the requeue"):
        late.check("the requeue")
    with pytest.raises(StaleAttempt, match="the start"):
        late.claim()
    living.check("a save")
    # one that had looked before the living one claimed, and writes after it
    late._write(dataclasses.replace(late.me, since_epoch_ns=1))
    living.check("a save")
    with pytest.raises(StaleAttempt):
        late.check("a save")


@pytest.mark.parametrize("content", [b"", b'{"v": 1, "tok', b"[]", b"\xff", b'{"token": 5}', None])
def test_a_damaged_claim_locks_nobody_out(content: bytes | None, tmp_path: Path) -> None:
    """Whatever stands there, or when somebody has removed it, a running attempt goes on, and a new
    one claims."""
    old, new = attempt(tmp_path), attempt(tmp_path, 1)
    old.check("a save")
    old.claim()
    old.path.unlink() if content is None else old.path.write_bytes(content)
    old.check("a save")
    new.claim()
    new.check("a save")
    with pytest.raises(StaleAttempt):
        old.check("a save")


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """The message names the file."""
    (tmp_path / "claim.json").mkdir()
    with pytest.raises(RunFolderError, match=r"claim\.json"):
        attempt(tmp_path).claim()


CALLS = ("open", "write", "fsync", "close", "replace")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_while_claiming_the_next_attempt_claims(
    call: str, moment: str, tmp_path: Path
) -> None:
    """SIGKILL around each call of a claim: the folder is the old attempt's or the new one's."""
    old = attempt(tmp_path)
    old.claim()
    child = os.fork()
    if child == 0:
        _die_at(call, moment)
        attempt(tmp_path, 1, began_s=60).claim()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    written = call == "replace" and moment == "after"
    if written:
        with pytest.raises(StaleAttempt):
            old.check("a save")
    else:
        old.check("a save")
    following = attempt(tmp_path, 2, began_s=120)
    following.claim()
    following.check("a save")


def _die_at(call: str, moment: str) -> None:
    """Have the next call of that name be the last one of this process."""

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def die(*arguments: Any, **options: Any) -> Any:
            if moment == "after":
                real(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        return die

    if call in ("open", "fsync", "replace"):
        setattr(os, call, dying(getattr(os, call)))
        return
    # the file object of what is written calls neither os.write() nor os.close()
    dying_file = type("DyingFile", (io.FileIO,), {call: dying(getattr(io.FileIO, call))})
    real = os.fdopen
    os.fdopen = lambda fd, mode: dying_file(fd, mode) if mode == "wb" else real(fd, mode)  # type: ignore


def test_of_many_at_once_one_holds_the_folder(tmp_path: Path) -> None:
    """Attempts that claim in the same moment never both hold it."""
    spawn = multiprocessing.get_context("fork")
    gate, done = spawn.Barrier(8), spawn.SimpleQueue()

    def race() -> None:
        fence = attempt(tmp_path, job=os.getpid())
        gate.wait()
        fence.claim()
        gate.wait()
        try:
            fence.check("a save")
        except StaleAttempt:
            done.put(0)
        else:
            done.put(1)

    racers = [spawn.Process(target=race) for _ in range(8)]
    for racer in racers:
        racer.start()
    holding = sum(done.get() for _ in racers)
    for racer in racers:
        racer.join()
    assert holding == 1

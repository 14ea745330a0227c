"""Training from FFRecord files: batches in one pass, any step, any number of ranks, any stop."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from data.recordbytes import ffrecord
from forkedranks import start, wait_for_end
from processes import Child, wait_until
from torch.utils.data import DataLoader, RandomSampler, Subset
from zygote import forked

from hydroslurm.data import ResumableSampler, SeededDataset, position_of
from hydroslurm.data.records import RecordDataset, RecordLoader
from hydroslurm.errors import RecordError, UsageError

SIZES = (9, 0, 14, 1)
SAMPLES = sum(SIZES)
GLOBAL_BATCH = 6  # of one, two or three ranks


class Numbers(RecordDataset):
    """Each sample is its number in decimal."""

    def process(self, indices: Sequence[Any], records: list[bytes]) -> list[Any]:
        assert len(indices) == len(records)
        return [int(record) for record in records]


class Halved(RecordDataset):
    def process(self, indices: Sequence[Any], records: list[bytes]) -> list[Any]:
        return records[::2]


def write(folder: Path, sizes: Sequence[int] = SIZES) -> Path:
    """Files of so many samples: the number of a sample among all of them."""
    folder.mkdir(exist_ok=True)
    first = 0
    for number, size in enumerate(sizes):
        samples = [str(n).encode() for n in range(first, first + size)]
        (folder / f"part-{number}.ffr").write_bytes(ffrecord(samples))
        first += size
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "files")


def seen(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_several_files_are_one(folder: Path) -> None:
    """A folder, a list in its own order, and a single file; numbers as of a list."""
    data = Numbers(folder)
    assert len(data) == SAMPLES
    assert list(data) == list(range(SAMPLES))
    assert data[[23, 0, 9, 8, 9, -1]] == [23, 0, 9, 8, 9, 23]
    assert data[-2] == 22
    assert pickle.loads(pickle.dumps(data))[(3, 20)] == [3, 20]
    assert Subset(data, [22, 4]).__getitems__([1, 0]) == [4, 22]
    files = [folder / "part-2.ffr", str(folder / "part-0.ffr")]
    assert Numbers(files)[[0, 14]] == [9, 0]
    assert RecordDataset(str(files[1]))[8] == b"8"
    for number in (24, -25):
        with pytest.raises(IndexError, match=f"Numbers has no record {number}, it has 24"):
            data[number]
    data.close()
    with pytest.raises(UsageError, match="was closed"):
        data[0]


def test_mistakes(folder: Path, tmp_path: Path) -> None:
    """Each is named with what to do."""
    (tmp_path / "empty").mkdir()
    for paths, message in (
        ([], r"\[\] has no \*\.ffr"),
        (tmp_path / "empty", r"empty has no \*\.ffr"),
    ):
        with pytest.raises(UsageError, match=message):
            RecordDataset(paths)
    with pytest.raises(UsageError, match=r"Halved.process\(\) returned 2 samples for 3 records"):
        Halved(folder)[[1, 2, 3]]
    data = Numbers(folder)
    with pytest.raises(UsageError, match="not of a RandomSampler; leave the sampler out"):
        RecordLoader(data, sampler=RandomSampler(data))
    with pytest.raises(UsageError, match="drop one"):
        RecordLoader(data, sampler=ResumableSampler(data), shuffle=True)
    with pytest.raises(UsageError, match=r"generator: the order is that of seed=.*RandomSampler"):
        RecordLoader(data, shuffle=True, generator=torch.Generator())
    with pytest.raises(UsageError, match=r"skippable=False, and has no set_step\(\)"):
        RecordLoader(data, sampler=RandomSampler(data), skippable=False).set_step(0)
    with pytest.raises(UsageError, match=r"a step in 0\.\.5 is wanted, not 6"):
        RecordLoader(data, 5).set_step(6)


class OwnItems(Numbers):
    """FFRecord's other form: numbers in, samples out."""

    def __getitem__(self, index: Any) -> Any:
        return [(index[0], sample) for sample in super().__getitem__(index)]


def test_as_with_ffrecord(folder: Path) -> None:
    """A __getitem__ of one's own gets the numbers of a batch; a + b are the samples of both; with
    torch's own sampler and skippable=False the order is torch's."""
    own = DataLoader(OwnItems(folder), 5, collate_fn=list)
    assert next(iter(own)) == [(0, number) for number in range(5)]
    both = Numbers(folder / "part-2.ffr") + Numbers(folder / "part-0.ffr")
    assert seen(RecordLoader(both, 23)) == [[*range(9, 23), *range(9)]]
    data = Numbers(folder)
    torchs, ours = (
        loader(data, 5, sampler=RandomSampler(data, generator=generator), generator=generator, **kw)
        for loader, kw in ((DataLoader, {}), (RecordLoader, {"skippable": False}))
        for generator in [torch.Generator().manual_seed(3)]
    )
    assert (
        seen(ours)
        == seen(torchs)
        == seen(DataLoader(data, 5, shuffle=True, generator=torch.Generator().manual_seed(3)))
    )


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """A sample is bytes until the caller decodes it."""
    hostile = b"cos\nsystem\n(S'false'\ntR."
    (tmp_path / "a.ffr").write_bytes(ffrecord([hostile]))
    assert next(iter(RecordLoader(RecordDataset(tmp_path)))) == [hostile]


@pytest.mark.parametrize("workers", [0, 2])
def test_any_step(folder: Path, workers: int) -> None:
    """From each step on, an epoch is what was left of it, and the one after it is whole."""
    loader = RecordLoader(
        Numbers(folder),
        5,
        shuffle=True,
        seed=3,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    whole: list[list[list[int]]] = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        whole.append(seen(loader))
        assert sorted(itertools.chain(*whole[-1])) == list(range(SAMPLES))
    assert whole[0] != whole[1]
    for step in range(6) if workers == 0 else (3,):
        loader.sampler.set_epoch(0)  # type: ignore[attr-defined]
        loader.set_step(step)
        assert seen(loader) == whole[0][step:]
        loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
        assert seen(loader) == whole[1]
        assert len(loader) == 5


def test_a_position_is_computed(folder: Path) -> None:
    """Resuming reads no batch again, with our loader and with torch's, seeded too."""
    data = Numbers(folder)
    loaders = (
        RecordLoader(data, 4, shuffle=True),
        DataLoader(data, 4, sampler=ResumableSampler(data)),
        RecordLoader(SeededDataset(data), 4, shuffle=True),
    )
    for loader in loaders:
        first, second = position_of(loader), position_of(loader)
        assert first.name == "sampler"
        batches = first.begin_epoch(1)
        used = [next(batches).tolist() for _ in range(2)]
        left = seen(second.resume_epoch(first.state_dict()))
        assert used + left == seen(position_of(loader).begin_epoch(1))


def test_a_damaged_record_in_a_worker(folder: Path) -> None:
    """The error that ends the loop has the file and the record's number in it."""
    path = folder / "part-2.ffr"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    loader = RecordLoader(Numbers(folder), 5, num_workers=1)
    with pytest.raises(RecordError, match=r"part-2\.ffr: the CRC of record 13 is 0x"):
        list(loader)


TESTS = Path(__file__).resolve().parents[1]
RANKS = f"""
import sys
sys.path[:0] = [{str(TESTS)!r}]
from forkedranks import serve
from data.test_records import be_rank
serve(be_rank)
"""
EPOCHS = 2
STEPS = 60  # of an epoch: ranks that know of a stop make some more until they agree


def be_rank(options: dict[str, Any], rank: int) -> None:
    """One attempt of a rank. In the step ``stop`` the last rank is told to go, as by Slurm."""
    import hydroslurm

    world, files = options["world"], Path(options["files"])
    data = SeededDataset(Numbers(files))
    loader = RecordLoader(data, GLOBAL_BATCH // world, shuffle=True, num_workers=options["workers"])
    model = torch.nn.Linear(1, 1)
    with hydroslurm.Run(
        model=model, loader=loader, directory=options["directory"], every_steps=0
    ) as run:
        for batch in run.batches(epochs=EPOCHS):
            print("saw", run.step, *batch.tolist(), flush=True)
            if run.step == options["stop"]:
                meet(options, "here", rank)
                if rank == world - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                wait_until(lambda: run.stop_requested, "the stop")
                meet(options, "told", rank)


def meet(options: dict[str, Any], place: str, rank: int) -> None:
    """Go on when all ranks are here: nothing else in this loop keeps them in step."""
    paths = [Path(f"{options['meet']}-{place}-{other}") for other in range(options["world"])]
    paths[rank].touch()
    wait_until(lambda: all(path.exists() for path in paths), f"all ranks {place}")


def attempt(
    program: Child,
    folder: Path,
    directory: str,
    *,
    world: int,
    stop: int | None = None,
    workers: int = 0,
) -> dict[int, list[int]]:
    """Step -> the samples that all ranks have seen in it."""
    begun = len(program.lines)
    start(
        program,
        world,
        meet=f"meet-{begun}",
        directory=str(folder / directory),
        files=str(folder / "files"),
        stop=stop,
        workers=workers,
    )
    codes = set(wait_for_end(program, world).values())
    assert codes == {0 if stop is None else 75}, str(program)
    steps: dict[int, list[int]] = {}
    for line in program.lines[begun:]:
        if line.startswith("saw "):
            step, *samples = map(int, line.split()[1:])
            steps[step] = sorted(steps.get(step, []) + samples)
    return steps


def test_stopped_inside_epochs_and_taken_up_by_other_ranks(tmp_path: Path) -> None:
    """SIGTERM to one of three ranks in the middle of an epoch, then to one of two with workers,
    then one rank to the end: each step has the samples of the run that was left alone, once."""
    write(tmp_path / "files", (STEPS, 0, 2 * STEPS, 3 * STEPS))
    with forked(RANKS, tmp_path) as program:
        program.expect("ready")
        alone = attempt(program, tmp_path, "alone", world=1)
        assert len(alone) == EPOCHS * STEPS
        parts = [
            attempt(program, tmp_path, "run", world=3, stop=2),
            attempt(program, tmp_path, "run", world=2, stop=STEPS + 2, workers=1),
            attempt(program, tmp_path, "run", world=1),
        ]
    assert all(2 <= max(part) % STEPS < STEPS - 1 for part in parts[:2])
    assert sum(len(part) for part in parts) == len(alone)
    assert {step: samples for part in parts for step, samples in part.items()} == alone

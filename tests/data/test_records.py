"""Training from FFRecord files: batches in one pass, any step, any stop."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from data.recordbytes import ffrecord
from torch.utils.data import DataLoader, RandomSampler, Subset

from hydroslurm.data import ResumableSampler, SeededDataset, position_of
from hydroslurm.data.records import RecordDataset, RecordLoader
from hydroslurm.errors import RecordError, UsageError

SIZES = (9, 0, 14, 1)
SAMPLES = sum(SIZES)


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

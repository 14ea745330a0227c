"""FFRecord files: written as the format says, read by number, never trusted, and trained from."""

from __future__ import annotations

import itertools
import os
import pickle
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, Subset

from hydroslurm.data import ResumableSampler, SeededDataset, position_of
from hydroslurm.data.records import RecordDataset, RecordFile, RecordLoader, RecordWriter
from hydroslurm.errors import RecordError, UsageError

SAMPLES = [b"first", b"", b"\x00\xff" * 700, b"x", b"the last one"]


def ffrecord(
    samples: list[bytes],
    *,
    count: int | None = None,
    bounds: list[int] | None = None,
    old: bool = False,
) -> bytes:
    """Header and samples, byte for byte.

    Args:
        count, bounds: a number of samples and offsets that are not true; the CRC is.
        old: without the header's CRC, as the first writers left it.
    """
    sizes = [len(sample) for sample in samples]
    starts = [12 + 12 * len(samples) + sum(sizes[:n]) for n in range(len(samples))]
    sums = [zlib.crc32(sample) for sample in samples]
    covered = struct.pack(
        f"<q{len(samples)}I{len(samples)}q",
        len(samples) if count is None else count,
        *sums,
        *(starts if bounds is None else bounds),
    )
    return struct.pack("<I", 0 if old else zlib.crc32(covered)) + covered + b"".join(samples)


def put(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@given(
    samples=st.lists(st.binary(max_size=40), max_size=8),
    old=st.booleans(),
    wanted=st.lists(st.integers(-8, 7), max_size=12),
)
def test_what_is_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, samples: list[bytes], wanted: list[int], *, old: bool
) -> None:
    """The writer's bytes are those of the format; any samples are read in any order."""
    folder = tmp_path_factory.mktemp("records")
    path = folder / "written.ffr"
    with RecordWriter(path, len(samples)) as writer:
        for sample in samples:
            writer.write(sample)
    assert path.read_bytes() == ffrecord(samples)
    assert names(folder) == ["written.ffr"]
    wanted = [n for n in wanted if -len(samples) <= n < len(samples)]
    with RecordFile(put(path, ffrecord(samples, old=old))) as file:
        assert len(file) == len(samples)
        assert list(file) == samples
        assert file.read_batch(wanted) == [samples[n] for n in wanted]


def test_every_byte_is_covered(tmp_path: Path) -> None:
    """A byte that is another one, or the end that is missing, is noticed and named; without
    verification CRCs are not looked at, sizes are, also of a file that becomes shorter."""
    whole = ffrecord(SAMPLES)
    path = tmp_path / "damaged.ffr"
    samples_at = 12 + 12 * len(SAMPLES)
    for at in (*range(samples_at + 8), len(whole) - 1):
        for content in (whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :], whole[:at]):
            with pytest.raises(RecordError, match=r"damaged\.ffr: ") as caught:  # noqa: SIM117
                with RecordFile(put(path, content)) as file:
                    list(file)
            if at >= samples_at and len(content) == len(whole):
                assert re.search(r"CRC of record [024] is 0x", str(caught.value))
    put(path, bytes([whole[0] ^ 1]) + whole[1:-1] + b"d")
    with RecordFile(path, verify=False) as file:
        assert file.read_batch([0, 4]) == [b"first", b"the last ond"]
        os.truncate(path, 80)
        assert file[0] == b"first"
        with pytest.raises(RecordError, match=r"damaged\.ffr: record 2: the file ends at byte 80"):
            file.read_batch([2])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes, too short"),
        (ffrecord(SAMPLES, count=1 << 62), f"{1 << 62} samples, for which 1490 bytes are too few"),
        (ffrecord(SAMPLES, count=-1), "names -1 samples"),
        (ffrecord(SAMPLES, bounds=[0, 72, 72, 72, 72]), "record 0 begins at byte 0, inside"),
        (ffrecord(SAMPLES, bounds=[72, 72, 72, 72, 1 << 50]), "record 4 begins at byte 1125"),
        (ffrecord(SAMPLES, bounds=[72, 2**63 - 1, -(2**63), 80, 80]), "record 1 begins at byte 92"),
    ],
)
def test_hostile_headers(content: bytes, message: str, tmp_path: Path) -> None:
    """Sizes that the file has no room for are refused before anything is allocated for them, with
    verification and without, and the file is closed."""
    path = put(tmp_path / "hostile.ffr", content)
    open_before = names(Path("/proc/self/fd"))
    for verify in (True, False):
        with pytest.raises(RecordError, match=re.escape(message)):
            RecordFile(path, verify=verify)
    assert len(names(Path("/proc/self/fd"))) == len(open_before)


def test_what_is_no_file(tmp_path: Path) -> None:
    """A FIFO is not waited for; links are followed; numbers that are not there are named. Another
    process opens a file anew, or shares it."""
    os.mkfifo(tmp_path / "fifo.ffr")
    (tmp_path / "link.ffr").symlink_to(put(tmp_path / "a.ffr", ffrecord(SAMPLES)))
    with pytest.raises(OSError, match="a FIFO"):
        RecordFile(tmp_path / "fifo.ffr")
    with RecordFile(tmp_path / "link.ffr", verify=False) as file:
        for number in (5, -6):
            with pytest.raises(IndexError, match=f"no record {number}, it has 5"):
                file.read_batch([0, number])
        with pickle.loads(pickle.dumps(file)) as again:
            assert (again[0], again.verify) == (b"first", False)
        if (pid := os.fork()) == 0:
            os._exit(file[4] != b"the last one")
        assert os.waitpid(pid, 0)[1] == 0
        assert file[0] == b"first"
    with pytest.raises(UsageError, match="was closed"):
        file[0]


def test_writing(tmp_path: Path) -> None:
    """An array is written whole, whatever its type and shape; what has no bytes is refused. After
    too few samples or an exception, what was there before is as it was, and nothing else is."""
    array = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    path = tmp_path / "a.ffr"
    with RecordWriter(path, 3) as writer:
        for sample in (array, numpy.zeros((0, 4)), bytearray(b"ab")):
            writer.write(sample)
        with pytest.raises(UsageError, match="begun for 3 samples, this is one more"):
            writer.write(b"")
    with RecordFile(path) as file:
        assert list(file) == [array.tobytes(), b"", b"ab"]
    before = path.read_bytes()
    for count, write, wanted in (
        (1, lambda one: one.write("text"), "contiguous buffer, not str"),
        (1, lambda one: one.write(array[:, ::2]), "contiguous buffer, not ndarray"),
        (2, lambda one: one.write(b"one"), "begun for 2 samples, and 1 were"),
        (1, lambda _: 1 // 0, "division"),
        (-1, lambda _: None, "at least 0 is wanted, not -1"),
    ):
        with (
            pytest.raises((UsageError, ZeroDivisionError), match=wanted),
            RecordWriter(path, count) as writer,
        ):
            write(writer)
    with pytest.raises(UsageError, match=r"named \*\.ffr, not 'a\.bin'"):
        RecordWriter(tmp_path / "a.bin", 1)
    with pytest.raises(UsageError, match="inside `with RecordWriter"):
        RecordWriter(path, 1).write(b"")
    assert path.read_bytes() == before
    assert names(tmp_path) == ["a.ffr"]


# --- training from them

SIZES = (9, 0, 14, 1)


class Numbers(RecordDataset):
    """Each sample is its number in decimal."""

    def process(self, indices: Sequence[Any], records: list[bytes]) -> list[Any]:
        assert len(indices) == len(records)
        return [int(record) for record in records]


class Halved(RecordDataset):
    def process(self, indices: Sequence[Any], records: list[bytes]) -> list[Any]:
        return records[::2]


class OwnItems(Numbers):
    """FFRecord's other form: numbers in, samples out."""

    def __getitem__(self, index: Any) -> Any:
        return [(index[0], sample) for sample in super().__getitem__(index)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of so many samples: the number of a sample among all of them."""
    for number, size in enumerate(SIZES):
        first = sum(SIZES[:number])
        samples = [str(n).encode() for n in range(first, first + size)]
        put(tmp_path / f"part-{number}.ffr", ffrecord(samples))
    return tmp_path


def seen(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_several_files_are_one(folder: Path) -> None:
    """A folder, a list in its own order, and a single file; numbers as of a list."""
    data = Numbers(folder)
    assert len(data) == 24
    assert list(data) == list(range(24))
    assert data[[23, 0, 9, 8, 9, -1]] == [23, 0, 9, 8, 9, 23]
    assert data[-2] == 22
    assert pickle.loads(pickle.dumps(data))[(3, 20)] == [3, 20]
    assert Subset(data, [22, 4]).__getitems__([1, 0]) == [4, 22]
    files = [folder / "part-2.ffr", str(folder / "part-0.ffr")]
    assert Numbers(files)[[0, 14]] == [9, 0]
    assert next(iter(RecordLoader(RecordDataset(str(files[1]))))) == [b"0"]  # until it is decoded
    for number in (24, -25):
        with pytest.raises(IndexError, match=f"Numbers has no record {number}, it has 24"):
            data[number]
    data.close()
    with pytest.raises(UsageError, match="was closed"):
        data[0]


def test_mistakes(folder: Path) -> None:
    """Each is named with what to do."""
    (folder / "empty").mkdir()
    data = Numbers(folder)
    plain = RandomSampler(data)
    for mistake, wanted in (
        (lambda: RecordDataset([]), r"\[\] has no \*\.ffr"),
        (lambda: RecordDataset(folder / "empty"), r"empty has no \*\.ffr"),
        (lambda: Halved(folder)[[1, 2, 3]], r"process\(\) returned 2 samples for 3 records"),
        (
            lambda: RecordLoader(data, sampler=plain),
            "not of a RandomSampler; leave the sampler out",
        ),
        (lambda: RecordLoader(data, sampler=ResumableSampler(data), shuffle=True), "drop one"),
        (
            lambda: RecordLoader(data, shuffle=True, generator=torch.Generator()),
            r"generator: the order is that of seed=.*RandomSampler",
        ),
        (
            lambda: RecordLoader(data, sampler=plain, skippable=False).set_step(0),
            r"skippable=False, and has no set_step\(\)",
        ),
        (lambda: RecordLoader(data, 5).set_step(6), r"a step in 0\.\.5 is wanted, not 6"),
    ):
        with pytest.raises(UsageError, match=wanted):
            mistake()


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
    shuffled = DataLoader(data, 5, shuffle=True, generator=torch.Generator().manual_seed(3))
    assert seen(ours) == seen(torchs) == seen(shuffled)


def test_a_damaged_record_in_a_worker(folder: Path) -> None:
    """The error that ends the loop has the file and the record's number in it."""
    path = folder / "part-2.ffr"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    loader = RecordLoader(Numbers(folder), 5, num_workers=1)
    with pytest.raises(RecordError, match=r"part-2\.ffr: the CRC of record 13 is 0x"):
        list(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_any_step(folder: Path, workers: int) -> None:
    """From each step on, an epoch is what was left of it, and the one after it is whole."""
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    loader: Any = RecordLoader(Numbers(folder), 5, shuffle=True, seed=3, **options)
    whole: list[list[list[int]]] = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        whole.append(seen(loader))
        assert sorted(itertools.chain(*whole[-1])) == list(range(24))
    assert whole[0] != whole[1]
    for step in range(6) if workers == 0 else (3,):
        loader.sampler.set_epoch(0)
        loader.set_step(step)
        assert seen(loader) == whole[0][step:]
        loader.sampler.set_epoch(1)
        assert seen(loader) == whole[1]
        assert len(loader) == 5


def test_a_position_is_computed(folder: Path) -> None:
    """Resuming reads no batch again, with our loader and with torch's, seeded too."""
    data = Numbers(folder)
    for loader in (
        RecordLoader(data, 4, shuffle=True),
        DataLoader(data, 4, sampler=ResumableSampler(data)),
        RecordLoader(SeededDataset(data), 4, shuffle=True),
    ):
        first, second = position_of(loader), position_of(loader)
        assert first.name == "sampler"
        batches = first.begin_epoch(1)
        used = [next(batches).tolist() for _ in range(2)]
        left = seen(second.resume_epoch(first.state_dict()))
        assert used + left == seen(position_of(loader).begin_epoch(1))

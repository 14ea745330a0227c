"""FFRecord files: written as the format says, read by number, and never trusted."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path

import numpy
import pytest
from data.recordbytes import ffrecord
from hypothesis import given
from hypothesis import strategies as st

from hydroslurm.data.records import RecordFile, RecordWriter
from hydroslurm.errors import RecordError, UsageError

SAMPLES = [b"first", b"", b"\x00\xff" * 700, b"x", b"the last one"]


def put(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all examples of a property."""
    return tmp_path_factory.mktemp("records")


@given(samples=st.lists(st.binary(max_size=40), max_size=8), old=st.booleans())
def test_what_is_written_and_read(folder: Path, samples: list[bytes], *, old: bool) -> None:
    """The writer's bytes are those of the format, and the reader reads bytes of the format."""
    path = folder / "written.ffr"
    with RecordWriter(path, len(samples)) as writer:
        for sample in samples:
            writer.write(sample)
    assert path.read_bytes() == ffrecord(samples)
    assert names(folder) == ["written.ffr"]
    with RecordFile(put(path, ffrecord(samples, old=old))) as file:
        assert len(file) == len(samples)
        assert list(file) == samples
        assert file.read_batch(range(-1, -1 - len(samples), -1)) == samples[::-1]


@given(wanted=st.lists(st.integers(-5, 4), max_size=12))
def test_any_samples_in_any_order(folder: Path, wanted: list[int]) -> None:
    """Repeated ones and neighbours too."""
    with RecordFile(put(folder / "any.ffr", ffrecord(SAMPLES))) as file:
        assert file.read_batch(wanted) == [SAMPLES[n] for n in wanted]


def test_one_pass_through_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is read in the order of the file, each sample once, and the kernel has heard of it
    all before the first."""
    calls: list[tuple[int, int]] = []

    def counted(fd: int, length: int, start: int) -> bytes:
        calls.append((start, length))
        return pread(fd, length, start)

    def advised(_fd: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        calls.append((start, length))

    pread = os.pread
    with RecordFile(put(tmp_path / "a.ffr", ffrecord([bytes([n]) * 10 for n in range(9)]))) as file:
        monkeypatch.setattr(os, "pread", counted)
        monkeypatch.setattr(os, "posix_fadvise", advised)
        file.read_batch([8, 3, 0, 4, 3, 2])
    begin = 12 + 9 * 12
    assert calls == 2 * [(begin + 10 * n, 10) for n in (0, 2, 3, 4, 8)]


def test_every_byte_is_covered(tmp_path: Path) -> None:
    """Whichever byte is another one, or missing with all behind it, it is noticed; the message has
    the file, and the record if that is what is damaged."""
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


def test_without_verification(tmp_path: Path) -> None:
    """CRCs are not looked at, sizes are."""
    content = bytearray(ffrecord(SAMPLES))
    content[-1] ^= 1
    content[0] ^= 1
    path = put(tmp_path / "a.ffr", bytes(content))
    with RecordFile(path, verify=False) as file:
        assert file.read_batch([0, 4]) == [b"first", b"the last ond"]
    with pytest.raises(RecordError, match="CRC of its header"):
        RecordFile(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes, too short"),
        (b"PK\x03\x04" * 100, "too few"),
        (ffrecord(SAMPLES, count=1 << 62), f"{1 << 62} samples, for which 1490 bytes are too few"),
        (ffrecord(SAMPLES, count=-1), "names -1 samples"),
        (ffrecord(SAMPLES, count=125), "names 125 samples"),
        (ffrecord(SAMPLES, bounds=[0, 72, 72, 72, 72]), "record 0 begins at byte 0, inside"),
        (ffrecord(SAMPLES, bounds=[72, 80, 79, 81, 82]), "record 1 begins at byte 80 and ends at"),
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


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    """Cut off while it is open: an error, not a short sample."""
    with RecordFile(put(tmp_path / "a.ffr", ffrecord(SAMPLES)), verify=False) as file:
        os.truncate(file.path, 80)
        assert file[0] == b"first"
        with pytest.raises(RecordError, match=r"a\.ffr: record 2: the file ends at byte 80"):
            file.read_batch([2])


def test_what_is_no_file(tmp_path: Path) -> None:
    """A FIFO is not waited for; links are followed; numbers that are not there are named."""
    os.mkfifo(tmp_path / "fifo.ffr")
    (tmp_path / "link.ffr").symlink_to(put(tmp_path / "a.ffr", ffrecord(SAMPLES)))
    with pytest.raises(OSError, match="a FIFO"):
        RecordFile(tmp_path / "fifo.ffr")
    with pytest.raises(FileNotFoundError):
        RecordFile(tmp_path / "none.ffr")
    with RecordFile(tmp_path / "link.ffr") as file:
        for number in (5, -6):
            with pytest.raises(IndexError, match=f"no record {number}, it has 5"):
                file.read_batch([0, number])
    with pytest.raises(UsageError, match="was closed"):
        file[0]


def test_pickled_and_forked(tmp_path: Path) -> None:
    """Another process opens it anew, or shares it."""
    with RecordFile(put(tmp_path / "a.ffr", ffrecord(SAMPLES)), verify=False) as file:
        with pickle.loads(pickle.dumps(file)) as again:
            assert (again[0], again.verify) == (b"first", False)
        if (pid := os.fork()) == 0:
            os._exit(file[4] != b"the last one")
        assert os.waitpid(pid, 0)[1] == 0
        assert file[0] == b"first"


def test_all_bytes_of_a_buffer(tmp_path: Path) -> None:
    """An array is written whole, whatever its type and shape; what has no bytes is refused."""
    array = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    with RecordWriter(tmp_path / "a.ffr", 3) as writer:
        writer.write(array)
        writer.write(numpy.zeros((0, 4)))
        writer.write(bytearray(b"ab"))
        with pytest.raises(UsageError, match="begun for 3 samples, this is one more"):
            writer.write(b"")
    with RecordFile(tmp_path / "a.ffr") as file:
        assert list(file) == [array.tobytes(), b"", b"ab"]
    with (
        pytest.raises(UsageError, match="contiguous buffer, not str"),
        RecordWriter(tmp_path / "b.ffr", 1) as writer,
    ):
        writer.write("text")
    with (
        pytest.raises(UsageError, match="contiguous buffer, not ndarray"),
        RecordWriter(tmp_path / "b.ffr", 1) as writer,
    ):
        writer.write(array[:, ::2])


def test_an_unfinished_file_is_none(tmp_path: Path) -> None:
    """Too few samples or an exception: what was there before is as it was, and nothing else is."""
    path = put(tmp_path / "a.ffr", b"before")
    with (
        pytest.raises(UsageError, match="begun for 2 samples, and 1 were"),
        RecordWriter(path, 2) as w,
    ):
        w.write(b"one")
    with pytest.raises(ZeroDivisionError), RecordWriter(path, 1) as w:
        w.write(b"one" * (1 // 0))
    assert path.read_bytes() == b"before"
    assert names(tmp_path) == ["a.ffr"]
    with pytest.raises(UsageError, match=r"named \*\.ffr, not 'a\.bin'"):
        RecordWriter(tmp_path / "a.bin", 1)
    with pytest.raises(UsageError, match="at least 0 is wanted, not -1"):
        RecordWriter(path, -1)
    with pytest.raises(UsageError, match="inside `with RecordWriter"):
        RecordWriter(path, 1).write(b"")

"""What calls CUDA, against a libcuda.so.1 of ours that checks its arguments as cuda.h documents
them (native/fake_cuda.cpp): the arena's driver, torch's side of it, and the checkpoint API's helper
with the real cuda-bindings."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
from processes import child

from hydroslurm.gate.compiler import source_files
from hydroslurm.vacate.arena import RECIPE
from hydroslurm.vacate.backend import DeviceState
from hydroslurm.vacate.communicators import Communicators
from hydroslurm.vacate.cuda_checkpoint import CudaCheckpoint
from hydroslurm.vacate.round import Limits, VacateRound

HERE = Path(__file__).parent / "native"
FLAGS = ("-std=c++17", "-O1", "-g1", "-pthread", "-Wall", "-Wextra", "-Werror")
ADDRESSES = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
LIMIT_S = 60.0


def headers() -> list[Path]:
    """The folders with a cuda.h: of NVIDIA's package, and of a toolkit."""
    found = importlib.util.find_spec("nvidia")
    packages = [] if found is None else list(found.submodule_search_locations or ())
    folders = [one.parent for root in packages for one in Path(root).glob("*/include/cuda.h")]
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")
    return [*folders, *([home] if (home / "cuda.h").exists() else [])]


@pytest.fixture(scope="module")
def library(native_compiler: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of our libcuda.so.1. Where there is a cuda.h, the compiler compares each of its
    functions with that."""
    folder = tmp_path_factory.mktemp("cuda")
    given = [f"-I{one}" for one in headers()[:1]]
    command = [*native_compiler, *FLAGS, *given, *["-DWITH_CUDA_H"] * len(given)]
    command += ["-shared", "-fPIC", str(HERE / "fake_cuda.cpp"), "-ldl"]
    _compile([*command, "-o", str(folder / "libcuda.so.1")])
    return folder


def _compile(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[:5000]


def test_types_are_those_of_cuda_h(native_compiler: list[str]) -> None:
    """Sizes, offsets, constants and the arguments of every call that the arena's driver declares
    for itself are those of each cuda.h on this machine."""
    if not headers():
        pytest.skip("no cuda.h here: pip install nvidia-cuda-runtime")
    for one in headers():
        command = [*native_compiler, *FLAGS, "-Wno-unused-function", f"-I{RECIPE.sources}"]
        _compile([*command, f"-I{one}", "-fsyntax-only", str(HERE / "cuda_abi.cpp")])


def test_the_driver_of_the_arena(native_compiler: list[str], library: Path, tmp_path: Path) -> None:
    """Each C++ test passes, under AddressSanitizer and UBSan: every call of CUDA's fails at every
    place, the device is full, streams are captured."""
    core = [p for p in source_files(RECIPE) if p.suffix == ".cpp" and p.stem != "torch_allocators"]
    program = tmp_path / "test_cuda"
    command = [*native_compiler, *FLAGS, *ADDRESSES, f"-I{RECIPE.sources}", *map(str, core)]
    _compile([*command, str(HERE / "test_cuda.cpp"), "-o", str(program), "-ldl"])
    environ = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "LD_LIBRARY_PATH": str(library)}
    names = subprocess.run([program], capture_output=True, text=True, timeout=30).stdout.split()
    assert len(names) > 6
    for name in names:
        one = subprocess.run(
            [program, name], capture_output=True, text=True, timeout=LIMIT_S, env=environ
        )
        assert one.returncode == 0, f"{name}: {one.returncode}\n{one.stderr[:3000]}"


TORCH_SIDE = """
    import ctypes, os
    from hydroslurm.vacate.arena import load
    from hydroslurm.vacate.arena_backend import ArenaBackend
    from hydroslurm.vacate.round import VacateRound

    library, cuda = load(), ctypes.CDLL("libcuda.so.1")
    pointer, functions = ctypes.c_void_p, library.functions
    alloc, free = functions.hs_arena_cuda_alloc, functions.hs_arena_cuda_free
    alloc.restype, alloc.argtypes = pointer, [ctypes.c_size_t, ctypes.c_int, pointer]
    free.restype, free.argtypes = None, [pointer, ctypes.c_size_t, ctypes.c_int, pointer]
    functions.hs_arena_cuda_record_stream.argtypes = [pointer, pointer]
    cuda.fake_cuda_used.restype = ctypes.c_size_t
    cuda.fake_cuda_capture.argtypes = [pointer, ctypes.c_int]
    assert library.why_no_cuda() == ""
    assert library.of_cuda(0) is None
    size, one, other = 40 << 20, 0x1000, 0x2000

    # a stream's blocks are its own; one that another stream has used is freed once that is idle
    at = alloc(size, 0, one)
    free(at, size, 0, one)
    assert alloc(size, 0, other) != at
    assert alloc(size, 0, one) == at
    functions.hs_arena_cuda_record_stream(at, other)
    free(at, size, 0, one)
    assert alloc(size, 0, one) == at

    # a capture reuses what it has freed itself, and nobody else does, on the same stream either
    cuda.fake_cuda_capture(one, 1)
    functions.hs_arena_cuda_record_stream(at, one)
    inside = alloc(size, 0, one)
    assert inside != at
    free(inside, size, 0, one)
    assert alloc(size, 0, one) == inside
    free(inside, size, 0, one)
    free(at, size, 0, one)  # used by the capture: never again
    cuda.fake_cuda_capture(one, 0)
    assert not cuda.fake_cuda_invalidated()
    again = alloc(size, 0, one)
    assert again not in (at, inside)
    cuda.fake_cuda_capture(one, 1)
    assert alloc(size, 0, one) not in (at, inside, again)  # the next capture is another
    cuda.fake_cuda_capture(one, 0)

    # torch.cuda.empty_cache()
    free(again, size, 0, one)
    before = cuda.fake_cuda_used()
    functions.hs_arena_cuda_empty_cache()
    assert before - cuda.fake_cuda_used() == size

    arena = library.of_cuda(0)
    live = alloc(size, 0, one)
    ctypes.memset(live, 5, size)
    for turn in range(4):
        folder = "" if turn < 3 else os.getcwd()
        backend = ArenaBackend(lambda: [arena], usual_bytes_per_s=1e9, folder=folder)
        used = cuda.fake_cuda_used()
        one_round = VacateRound(backend, topic=str(turn))
        away = one_round.vacate(backend.refusal())
        assert (away.done, away.moved_bytes, cuda.fake_cuda_used()) == (True, used, 0), away
        if turn == 1:
            cuda.fake_cuda_fail(b"cuMemCreate", 2, 2)  # somebody else was quicker
        waits = []
        back = one_round.restore(waits.append)
        assert back.done and cuda.fake_cuda_used() == used, back
        assert ("CUDA_ERROR_OUT_OF_MEMORY" in "".join(waits)
                or "no memory is free" in "".join(waits)) == (turn == 1), waits
    assert ctypes.string_at(live, size) == bytes([5]) * size
    cuda.fake_cuda_fail(b"cuMemcpyDtoH_v2", 1, 700)
    failed = VacateRound(backend, topic="x").vacate(backend.refusal())
    assert not failed.done and not failed.lost
    assert "copy_to_host(): CUDA_ERROR_ILLEGAL_ADDRESS" in failed.reason, failed
    print("end", arena.state.value, flush=True)
"""


def test_torchs_side_of_it(library: Path, tmp_path: Path) -> None:
    """The functions that torch calls, and rounds of the backend: streams, captures, an emptied
    cache, a device that is full at the return; a failure is told by CUDA's own name. From pinned
    memory, and from a file."""
    with child(TORCH_SIDE, tmp_path, environ={"LD_LIBRARY_PATH": str(library)}) as process:
        assert process.expect("end") == "running"


def test_the_helper_with_the_real_bindings(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real helper, and the real cuda-bindings in it, walk through the checkpoint API's states;
    an error has its name, and a state that these bindings have no word for is waited for."""
    pytest.importorskip("cuda.bindings", reason="needs hydroslurm[gpu]")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("FAKE_CUDA_FOLDER", str(tmp_path))
    state = tmp_path / str(os.getpid())
    backend = CudaCheckpoint(
        used_bytes=lambda: 1000, devices=1, communicators=Communicators(environ={})
    )
    try:
        assert backend.refusal() == ""
        one = VacateRound(backend, topic="t", limits=Limits(retry_s=0.01))
        (tmp_path / "fail-restore").write_text("2")
        assert one.vacate().done
        assert backend.state(1.0) is DeviceState.CHECKPOINTED
        waits: list[str] = []
        assert one.restore(waits.append).done
        assert "cuCheckpointProcessRestore: CUDA_ERROR_OUT_OF_MEMORY" in waits[0]
        assert state.read_text() == "0\n"
        (tmp_path / "fail-checkpoint").write_text("801")
        away = VacateRound(backend, topic="t").vacate()
        assert "CUDA_ERROR_NOT_SUPPORTED" in away.reason
        assert state.read_text() == "0\n"
        state.write_text("77")
        assert backend.state(0.5) is DeviceState.UNKNOWN
    finally:
        backend.close()

"""Real training in the arena: it is paused and vacated again and again, its driver fails and hangs,
and the weights are those of a run that nobody disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import resident_bytes, wait_until
from zygote import forked

from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import UsageError
from hydroslurm.runtime import client
from hydroslurm.vacate.arena_backend import open_arena
from hydroslurm.vacate.policy import VacateBy

ARENA = {"HYDROSLURM_VACATE_BY": "arena"}
CYCLES = 6

TRAIN = """
    import hashlib, sys, torch, hydroslurm
    controller = hydroslurm.install(run_dir=sys.argv[1])
    torch.set_num_threads(1)

    def train(steps):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])
        optimizer = torch.optim.AdamW(model.parameters())
        data = torch.randn(16, 512)
        for _ in steps:
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            if steps is disturbed:
                at = [hex(p.data_ptr()) for p in model.parameters() if p.nbytes > 1e6]
                print("step", *at, flush=True)
                sys.stdin.readline() if len(taken) % 5 == 0 else None
        one = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        return hashlib.sha256(one).hexdigest()

    taken = []
    def counted():
        for n in range(int(sys.argv[2]) * 5):
            taken.append(n)
            yield n
    disturbed = counted()
    wanted = train(range(int(sys.argv[2]) * 5))
    print("ready", flush=True)
    print("hash", train(disturbed) == wanted, flush=True)
"""


def test_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Pauses in the middle of the training move what it has into a file, and free it. The addresses
    stay, and the weights' hash at the end is that of an undisturbed run."""
    environ = {**ARENA, "HYDROSLURM_VACATE_DIR": str(tmp_path)}
    arguments = (str(tmp_path / "run"), str(CYCLES))
    with forked(TRAIN, tmp_path, *arguments, environ=environ) as process:
        process.expect("ready")
        for _ in range(CYCLES):
            told = process.expect("step")
            addresses = [int(one, 16) for one in told.split()]
            before_bytes = resident_bytes(process.pid, addresses)
            assert before_bytes > 6 << 20
            answer = client.pause(process.pid, vacate=True, timeout_s=60)
            assert answer.done, answer.message
            assert answer.vacated_bytes
            assert answer.vacated_bytes >= before_bytes
            assert resident_bytes(process.pid, addresses) == 0
            assert client.resume(process.pid, timeout_s=60).done
            for _ in range(4):
                process.expect("step")
            process.say("go on")
        assert process.expect("hash") == "True"
    events = list(read_events(RunDir(tmp_path / "run").rank_events(0)))
    told_by = [one.data["backend"] for one in events if one.kind is EventKind.VACATED]
    assert told_by == ["arena"] * CYCLES


FAULTS = """
    import ctypes, errno, threading, time, torch
    from hydroslurm.vacate.arena import load
    from hydroslurm.vacate.arena_backend import ArenaBackend
    from hydroslurm.vacate.backend import DeviceState
    from hydroslurm.vacate.round import Limits, VacateRound

    CALLS = ("reserve", "create", "map", "open", "set_access", "unmap", "release",
             "copy_to_host", "copy_from_host", "synchronize", "host_alloc", "host_free")
    Call = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * 5)

    class Driver(ctypes.Structure):
        _fields_ = [("self", ctypes.c_void_p), ("granularity", ctypes.c_size_t),
                    ("alignment", ctypes.c_size_t), ("touched_by_threads", ctypes.c_int),
                    *[(name, ctypes.c_void_p) for name in CALLS]]

    library = load()
    library.functions.hs_page_driver.restype = ctypes.POINTER(Driver)
    driver = library.functions.hs_page_driver().contents
    kept, faults, go_on = [], {}, threading.Event()

    def wrap(name):
        real = Call(getattr(driver, name))
        def call(*arguments):
            how = faults.pop(name, "")
            if how == "fail":
                return -errno.EIO
            if how == "hang":
                go_on.wait()
            return real(*arguments)
        kept.append(Call(call))
        setattr(driver, name, ctypes.cast(kept[-1], ctypes.c_void_p))

    for name in CALLS:
        wrap(name)
    arena = library.serve_cpu()
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(64, 1024)

    def step():
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    def bits():
        state = [one for s in optimizer.state.values() for one in s.values()]
        return [one.detach().clone() for one in (*model.parameters(), *state)]

    step()
    for how, names, limit_s in (
        ("fail", CALLS[1:], 20), ("hang", ("synchronize", "copy_to_host", "unmap", "create"), 0.5)
    ):
        limits = Limits(lock_s=limit_s, state_s=limit_s, move_s=limit_s, retry_s=0.01)
        for name in names:
            wanted = bits()
            go_on.clear()
            backend = ArenaBackend(lambda: [arena], usual_bytes_per_s=1e9)
            faults[name] = how
            one = VacateRound(backend, topic="x", limits=limits)
            away = one.vacate(backend.refusal())
            back = one.restore(lambda reason: None) if away.done else None
            last = back or away
            lost = last.lost
            go_on.set()  # what hangs for good is lost; here it ends, and the bits must be there
            for thread in threading.enumerate():
                if thread.name.startswith("hydroslurm-arena"):  # a call that was given up
                    thread.join()
            while backend.state(5) is DeviceState.CHECKPOINTED:
                arena.restore()
            if backend.state(5) is DeviceState.LOCKED:
                arena.unlock()
            assert not faults, faults
            faults.clear()
            same = all(map(torch.equal, wanted, bits()))
            step()
            print("case", how, name, int(away.done), int(bool(back and back.done)), int(lost),
                  int(same), last.reason or "-", flush=True)
    print("end", arena.state.value, arena.numbers.leaked_bytes, flush=True)
"""


def test_every_call_fails_and_hangs(tmp_path: Path) -> None:
    """Through the round (test_arena.cpp has all of them): a failure before anything is unmapped is
    a pause that did not vacate; a later one is undone, or passes. A hang that cannot be given up is
    told as lost. The bits are there after each one, and the training's next step is made."""
    found = {}
    with forked(FAULTS, tmp_path) as process:
        for _ in range(15):
            how, name, away, back, lost, same, reason = process.expect("case").split(" ", 6)
            assert same == "1", (how, name)
            found[how, name] = (away == "1", back == "1", lost == "1", reason)
        state, leaked_bytes = process.expect("end").split()
        assert state == "running"
        assert int(leaked_bytes) > 0  # of the one release that failed
    for name in ("synchronize", "host_alloc", "set_access", "copy_to_host", "unmap"):
        away, _, lost, reason = found["fail", name]
        assert not away
        assert not lost
        assert name in reason
    for name in ("create", "map", "open", "copy_from_host", "release", "host_free"):
        assert found["fail", name][:3] == (True, True, False), name
    for name in ("synchronize", "copy_to_host"):
        away, _, lost, reason = found["hang", name]
        assert not away
        assert not lost
        assert "nothing has changed" in reason
    for name in ("unmap", "create"):
        _, _, lost, reason = found["hang", name]
        assert lost, name
        assert "did not answer within" in reason


def test_what_it_cannot_do_is_told(tmp_path: Path) -> None:
    """Where the library cannot be had, the training goes on and a pause says why it did not vacate;
    a folder that cannot be written is named."""
    code = """
        import sys, warnings, torch
        warnings.simplefilter("always")
        import hydroslurm
        hydroslurm.install(run_dir=sys.argv[1], gate=sys.argv[2])
        model = torch.nn.Linear(256, 256)
        print("ready", flush=True)
        while sys.argv:
            model(torch.ones(64, 256)).sum().backward()
    """
    broken = {"CXX": "/nowhere/c++", "XDG_CACHE_HOME": str(tmp_path / "empty")}
    missing = {"HYDROSLURM_VACATE_DIR": "/nowhere/nvme"}
    cases: list[tuple[str, dict[str, str], str]] = [
        ("hooks", broken, "no C++ compiler was found"),
        ("native", missing, "/nowhere/nvme (HYDROSLURM_VACATE_DIR)"),
    ]
    for number, (gate, environ, wanted) in enumerate(cases):
        run = str(tmp_path / f"run-{number}")
        with forked(code, tmp_path, run, gate, environ={**ARENA, **environ}) as process:
            process.expect("ready")
            answer = client.pause(process.pid, vacate=True, timeout_s=60)
            assert not answer.done
            assert wanted in answer.message
            assert client.resume(process.pid, timeout_s=60).done
            events = RunDir(tmp_path / f"run-{number}").rank_events(0)
            wait_until(lambda e=events: "not_vacated" in e.read_text(), "the event")


def test_the_variable() -> None:
    """Another word is refused with the known ones."""
    assert VacateBy.from_environ({}) is VacateBy.CUDA_CHECKPOINT
    assert VacateBy.from_environ({"HYDROSLURM_VACATE_BY": " Arena "}) is VacateBy.ARENA
    with pytest.raises(UsageError, match="'vmm'; wanted one of cuda-checkpoint, arena"):
        VacateBy.from_environ({"HYDROSLURM_VACATE_BY": "vmm"})


def test_a_folder_without_an_arena() -> None:
    """Nothing is written there; whoever set it, is told."""
    environ = {"HYDROSLURM_VACATE_DIR": "/nvme"}
    with pytest.warns(RuntimeWarning, match="'/nvme' has no effect without HYDROSLURM_VACATE_BY"):
        open_arena(environ)

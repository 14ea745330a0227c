"""The parts: ``parts.py NAME FOLDER RESULT``, each a process of its own, started by ``drive.py``.

Every figure is written into RESULT as soon as it is known, so that a part which is ended at its
limit leaves what it has found. What fails inside a part is recorded, with its traceback on stderr,
and the rest of the part goes on.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from harness import EventTail, bare, installed, median_ratio, p50_p99, rounded, time_interleaved
from training import DEVICE, DRY, GIB, Training, deterministic, release, size_for, synchronize

# isort: split
import processes

from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.runtime import client

HERE = Path(__file__).resolve().parent
LIMIT_S, START_S = (300.0, 400.0) if DRY else (60.0, 150.0)
"""For one answer of a training; and where it has to start and compile before. Without a device the
machine may have much else to do."""
CYCLES = 2 if DRY else 5
GB = 1e9


class Result:
    """What a part has found so far, in its file: a line of JSON for each discovery."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed = False

    def add(self, **figures: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(rounded(figures)) + "\n")

    def fail(self, why: str) -> None:
        self.failed = True
        self.add(failure=why)

    def require(self, **checks: bool) -> None:
        """Record checks; one that does not hold fails the part."""
        self.add(**checks)
        for name, holds in checks.items():
            if not holds:
                self.fail(f"{name} is false")

    @contextlib.contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """What is raised inside is a failure of the part, and does not end it."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.fail(f"{what}: {type(error).__name__}: {error}"[-600:])


class Child(processes.Child):
    """A training that speaks in lines of JSON; it is not there after the block."""

    stderr = None  # the part's: what a library writes there must not fall into a line

    def __init__(
        self, what: str, folder: Path, *argv: str, environ: Mapping[str, str] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(f"import {what}\n{what}.main()", folder, *argv, environ=environ)
        self.seen: dict[str, Any] = {}

    def told(self, key: str, *, limit_s: float = START_S) -> Any:
        """The value of the next line that has this key; all are kept in ``seen``."""
        while True:
            line = json.loads('{"' + self.expect('{"', limit_s=limit_s))
            self.seen |= line
            if key in line:
                return line[key]

    def go_on(self) -> None:
        self.say("")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        print(*(line for line in self.lines if not line.startswith('{"')), sep="\n", flush=True)


def trains(
    mode: str, folder: Path, *, environ: Mapping[str, str] | None = None, **options: Any
) -> Child:
    """One of ``training.py``, whose run is in the folder."""
    options["run"] = str(folder)
    return Child("training", folder, mode, json.dumps(options), environ=environ)


Start = Callable[[Path], Child]


def stopped_and_resumed(
    start: Start,
    folder: Path,
    *,
    at: int,
    alone: bool = True,
    pause: Callable[[Child], None] = lambda _: None,
) -> tuple[dict[str, Any], Child, bool]:
    """Train undisturbed; and again, stopped by SIGTERM at a step and started anew.

    Args:
        start: starts the training in a folder.
        alone: the undisturbed one has ended before the other begins.
        pause: what is done to the one that is stopped, half way.

    Returns:
        What the stop was, the training that was started anew and has ended, and whether it has the
        weights of the undisturbed one.
    """
    with start(folder / "undisturbed") as undisturbed:
        if alone:
            undisturbed.wait(limit_s=START_S)
        with start(folder / "stopped") as child:
            while child.told("step") < at // 2:
                pass
            pause(child)
            while child.told("step") < at:
                pass
            began_s = time.monotonic()
            child.signal(signal.SIGTERM)
            found = {
                "stop_exit_status": child.wait(limit_s=LIMIT_S),
                "sigterm_to_exit_s": time.monotonic() - began_s,
                "stopped_at_step": child.seen["step"],
            }
        with start(folder / "stopped") as child:
            found["first_step_after_restart"] = child.told("step")
            weights = child.told("weights"), child.seen.get("scale")
            child.wait(limit_s=LIMIT_S)
        same = weights == (undisturbed.told("weights"), undisturbed.seen.get("scale"))
    return found, child, same


def stop_of_a_run(folder: Path, child: Child, found: dict[str, Any]) -> dict[str, Any]:
    """What :func:`stopped_and_resumed` has found of a Run, with what its events say."""
    events = list(read_events(RunDir(folder / "stopped").rank_events(0)))
    asked = next(e for e in events if e.kind is EventKind.STOP_REQUESTED)
    done = [e for e in events if e.kind is EventKind.SAVE_COMMITTED and e.pid == asked.pid]
    if child.seen["from_step"] < found["stopped_at_step"]:
        raise RuntimeError(f"resumed from {child.seen['from_step']}; {found}")
    return {
        "stop_exit_status": found["stop_exit_status"],
        "sigterm_to_exit_s": found["sigterm_to_exit_s"],
        "stop_to_committed_s": (done[-1].mono_ns - asked.mono_ns) / 1e9,
        "resumed_from_step": child.seen["from_step"],
        "load_s": child.seen["load_s"],
    }


# --- 1: the gate, and pauses


def gate(result: Result, folder: Path) -> None:
    """Build it, test it, pause a training with it from here, and compare the weights."""
    from hydroslurm.gate import build
    from hydroslurm.gate.build import find_compiler
    from hydroslurm.gate.library import installed_torch
    from hydroslurm.gate.native_gate import NativeGate

    made_for = installed_torch()
    result.add(compiler=find_compiler(os.environ)[0], nvtx_headers=str(made_for.nvtx))
    found = build.ensure(os.environ, torch=made_for)  # tested in a child while it is built
    result.add(built_s=found.built_s, was_built=found.built_s is not None)
    if found.built_s is None:
        build.self_test_in_child(found.path)
    result.require(gate_loads=NativeGate().path.name == found.path.name)
    figures, same = pauses(folder, size="large", count=3 if DRY else 50)
    result.add(**figures)
    result.require(bits_equal_with_pauses=same)


def pauses(
    run: Path, *, size: str, count: int, environ: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], bool]:
    """Pause a training so often, at random moments of its steps; percentiles, and whether its
    weights are those of the undisturbed one."""
    seen: list[dict[str, float]] = []
    with trains("loop", run, size=size, pauses=count, environ=environ) as child:
        pid = child.told("ready")
        child.told("undisturbed")
        events = EventTail(RunDir(run).rank_events(0))
        for _ in range(count):
            child.told("at", limit_s=LIMIT_S)
            time.sleep(random.uniform(0.0, 0.06))
            seen.append(_one_pause(pid, events))
        same = child.told("disturbed") == child.seen["undisturbed"]
        child.go_on()
        child.wait()
    figures: dict[str, Any] = {"pauses": count, "steps": child.seen["steps"]}
    for name in sorted({name for one in seen for name in one}):
        figures |= p50_p99(name, [one[name] for one in seen if name in one])
    if not DRY:
        figures["drained_ratio"] = sum("parked_to_drained_ms" in one for one in seen) / count
    return figures, same


def _one_pause(pid: int, events: EventTail) -> dict[str, float]:
    """Times from the kill() here to the event there: both read CLOCK_MONOTONIC."""
    sent_ns = time.monotonic_ns()
    os.kill(pid, signal.SIGUSR1)
    parked = events.until(EventKind.PARKED, limit_s=LIMIT_S)
    figures = {"kill_to_parked_us": (parked.mono_ns - sent_ns) / 1e3}
    if not DRY:
        drained = events.until(EventKind.DRAINED, EventKind.NOT_DRAINED, limit_s=LIMIT_S)
        if drained.kind is EventKind.DRAINED:
            figures["parked_to_drained_ms"] = (drained.mono_ns - parked.mono_ns) / 1e6
            figures["kill_to_drained_ms"] = (drained.mono_ns - sent_ns) / 1e6
    time.sleep(0.02)
    sent_ns = time.monotonic_ns()
    os.kill(pid, signal.SIGUSR2)
    resumed = events.until(EventKind.RESUMED, limit_s=LIMIT_S)
    figures["resume_to_open_us"] = (resumed.mono_ns - sent_ns) / 1e3
    if resumed.data.get("held"):  # a thread that waited for the device was quiet, not held
        running = events.until(EventKind.FIRST_OPERATOR_RELEASED, limit_s=LIMIT_S)
        figures["resume_to_running_us"] = (running.mono_ns - sent_ns) / 1e3
    return figures


# --- 2: overhead


def overhead(result: Result, folder: Path) -> None:
    """Time per step, installed and not paused / bare: of a model that keeps the device busy, and of
    one whose cost is its launches."""
    from hydroslurm.gate.native_gate import NativeGate

    deterministic()
    for size in ("large", "small"):
        training = Training(size_for(size))
        training.step()
        with NativeGate().trace(0) as trace:
            training.step()
        arms = {"bare": bare, "installed": installed, "again": bare}
        seen = time_interleaved(
            training.step,
            {name: functools.partial(arm, folder) for name, arm in arms.items()},
            rounds=2 if DRY else 10,
            segment_s=0.05 if DRY else 0.3,
            settle=synchronize,
        )
        result.add(
            **{
                f"ratio_installed_{size}": median_ratio(seen, "installed", "bare"),
                f"ratio_bare_again_{size}": median_ratio(seen, "again", "bare"),
                f"step_ms_{size}": 1e3 * statistics.median(seen["bare"]),
                f"rounds_{size}": len(seen["bare"]),
                f"gate_points_per_step_{size}": trace.count,
            }
        )
        del training
        release()


# --- 3: stop and resume


def run(result: Result, folder: Path) -> None:
    """A Run with model, optimizer, scaler and generators on the device: stopped, restarted, and
    compared with an undisturbed one; what its saves and its load cost."""
    with result.trying("staging"):
        _staging_on_device(result)
    with result.trying("random numbers"):
        _random_numbers_on_device(result)
    steps, every = (12, 5) if DRY else (36, 11)
    found, child, same = stopped_and_resumed(
        lambda run: trains("run", run, steps=steps, every=every), folder, at=steps // 2
    )
    result.require(bits_equal_after_stop=same)
    found = stop_of_a_run(folder, child, found)
    events = list(read_events(RunDir(folder / "undisturbed").rank_events(0)))
    stalls_s = [e.data["seconds"] for e in events if e.kind is EventKind.SAVE_STAGED]
    stall_s = statistics.median(stalls_s[1:] or stalls_s)  # the first takes longer
    done = [e.data for e in events if e.kind is EventKind.SAVE_COMMITTED]
    state_gb = done[0]["state_bytes"] / GB
    copy_s = child.seen["pinned_copy_s"]
    result.add(
        state_gb=state_gb,
        periodic_saves=len(done),
        stall_ms=1e3 * stall_s,
        pinned_copy_ms=1e3 * copy_s,
        stall_ratio_to_pinned_copy=stall_s / copy_s,
        periodic_save_gb_per_s=state_gb / statistics.median(e["seconds"] for e in done),
        **found,
        load_gb_per_s=state_gb / found["load_s"],
    )


def _staging_on_device(result: Result) -> None:
    """The copy of a save is in pinned memory, and later changes on the device do not reach it."""
    from hydroslurm.checkpoint.host_memory import Staging
    from hydroslurm.checkpoint.store import State
    from hydroslurm.checkpoint.write_plan import divide

    wide = torch.randn(2**20, device=DEVICE)
    plan = divide(State(shared={"x": wide}, own={}), rank=0, world_size=1)
    wanted, staging, same = wide.cpu().clone(), Staging(), True
    for _ in range(2):
        copied = staging.copy(plan)
        assert copied is not None, staging.refused
        wide.add_(1)
        (copy,) = copied.tensors
        same = same and torch.equal(copy.reshape(-1), wanted)
        wanted = wide.cpu().clone()
    result.require(staged_copy_equal=same)
    if not DRY:
        result.require(staged_copy_is_pinned=copy.is_pinned())


def _random_numbers_on_device(result: Result) -> None:
    """The device draws the same again; a device without a saved state is named."""
    import warnings

    from hydroslurm.checkpoint import rng

    torch.rand(5, device=DEVICE)
    state = rng.capture()
    wanted = torch.rand(5, device=DEVICE).tolist()
    torch.manual_seed(9)  # of all devices
    rng.restore(state)
    result.require(random_numbers_equal=torch.rand(5, device=DEVICE).tolist() == wanted)
    if not DRY:
        del state["devices"]["cuda:0"]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            rng.restore(state)
        result.require(lacking_device_is_named=any("cuda:0" in str(one.message) for one in said))


# --- 4: device memory


def _used_bytes() -> int:
    """Of the device, by all processes together."""
    if DRY:
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def vacate(result: Result, folder: Path) -> None:
    """CUDA's checkpoint API, again and again between the steps of a training; without a device the
    tests' model of it."""
    variants = ("eager", "workers") if DRY else ("eager", "graphs", "compile", "workers")
    with contextlib.ExitStack() as stack:
        children: dict[str, Child] = {}
        for variant in variants:  # all start and compile side by side; then one after the other
            run = folder / variant
            run.mkdir()
            size, fake = "large" if variant == "eager" else "small", str(run) if DRY else ""
            options = {"variant": variant, "pauses": CYCLES, "fake": fake, "go": True}
            children[variant] = stack.enter_context(trains("loop", run, size=size, **options))
        for variant, child in children.items():
            with result.trying(variant):
                child.told("undisturbed", limit_s=START_S if DRY else 75.0)
            if "undisturbed" not in child.seen:
                child.process.kill()
        for variant, child in children.items():
            if "undisturbed" not in child.seen:
                continue
            with result.trying(variant), child:
                end = "" if variant == "eager" else f"_{variant}"
                _vacate_one(result, child, folder / variant, end)


def _vacate_one(result: Result, child: Child, run: Path, end: str) -> None:
    pid = child.seen["ready"]
    child.go_on()
    rows: list[dict[str, float]] = []
    for number in range(CYCLES):
        child.told("at", limit_s=LIMIT_S)
        row = {"used_before_gb": _used_bytes() / GB, "host_before_gb": _host_bytes(pid) / GB}
        began_s = time.monotonic()
        answer = client.pause(pid, vacate=True, timeout_s=LIMIT_S)
        row["pause_to_answer_s"] = time.monotonic() - began_s
        if not answer.done:
            client.resume(pid, timeout_s=LIMIT_S)
            raise RuntimeError(f"refused: {answer.message}")
        row |= {"used_while_gb": _used_bytes() / GB, "host_while_gb": _host_bytes(pid) / GB}
        freed_gb = row["used_before_gb"] - row["used_while_gb"]
        if not end and number == CYCLES - 1 and not DRY:
            _use_device(int(freed_gb * GB / 2))
            result.add(other_process_used_gb=freed_gb / 2)
        began_s = time.monotonic()
        resumed = client.resume(pid, timeout_s=LIMIT_S)
        row["resume_to_answer_s"] = time.monotonic() - began_s
        row |= {"used_after_gb": _used_bytes() / GB, "freed_gb": freed_gb}
        if not resumed.done:
            raise RuntimeError(f"not resumed: {resumed.message}")
        rows.append(row)
        result.add(**{f"cycles{end}": number + 1})
    same = child.told("disturbed") == child.seen["undisturbed"]
    child.go_on()
    child.wait()
    result.require(**{f"bits_equal{end}": same})
    for name in ("freed_gb", "pause_to_answer_s") if end else rows[0]:
        result.add(**{f"{name}{end}": statistics.median(row[name] for row in rows)})
    events = list(read_events(RunDir(run).rank_events(0)))
    freed = statistics.median(row["freed_gb"] for row in rows)
    moves = {}
    for kind, name in ((EventKind.VACATED, "vacate"), (EventKind.RESTORED, "restore")):
        took_s = [e.data["moved_s"] for e in events if e.kind is kind]
        moves[name] = statistics.median(took_s)
        result.add(**{f"{name}_s{end}": moves[name], f"first_{name}_s{end}": took_s[0]})
    if DRY:
        return
    result.require(**{f"most_is_freed{end}": freed > 0.6 * (answer.vacated_bytes or 0) / GB})
    links = _link_gb_per_s(int(freed * GB))
    for (name, took_s), (link, rate) in zip(moves.items(), links.items(), strict=True):
        result.add(
            **{
                f"{name}_gb_per_s{end}": freed / took_s,
                f"pinned_{link}_gb_per_s{end}": rate,
                f"{name}_ratio_to_pinned_copy{end}": freed / took_s / rate,
            }
        )


def _host_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


def _use_device(size_bytes: int) -> None:
    """Another process has the device meanwhile: this one."""
    torch.full((size_bytes,), 7, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _link_gb_per_s(size_bytes: int) -> dict[str, float]:
    """Copies of so many bytes from the device to pinned memory, and back: medians of three."""
    piece = max(2**20, min(size_bytes, 2 * GIB))
    device = torch.ones(piece, dtype=torch.uint8, device=DEVICE)
    host = torch.empty(piece, dtype=torch.uint8, pin_memory=True)
    times = max(1, round(size_bytes / piece))
    rates = {}
    for name, source, target in (("to_host", device, host), ("to_device", host, device)):
        took_s = []
        for _ in range(4):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            for _ in range(times):
                target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            took_s.append(time.perf_counter() - began_s)
        rates[name] = times * piece / GB / statistics.median(took_s[1:])
    del device
    torch.cuda.empty_cache()
    return rates


# --- 5: launches ahead of the device


def launch_ahead(result: Result, folder: Path) -> None:
    """Throughput with a bound on launches / without one, and how soon the device is idle."""
    if not DRY:
        with result.trying("bounds"):
            _bounds(result)
    environ = {"HYDROSLURM_LAUNCH_AHEAD_MS": "20"}
    figures, same = pauses(folder, size="large", count=2 if DRY else 15, environ=environ)
    result.add(**{f"{name}_bound_20": value for name, value in figures.items()})
    result.require(bits_equal_bound_20=same)
    last = list(read_events(RunDir(folder).rank_events(0)))[-1]
    result.add(bound_20_did=last.data.get("launch_ahead"))


def _bounds(result: Result) -> None:
    from hydroslurm.gate.native_gate import NativeGate

    deterministic()
    native, training = NativeGate(), Training(size_for("large"))
    seen: dict[int, list[tuple[float, float]]] = {bound_ms: [] for bound_ms in (0, 5, 20, 50)}
    for _ in range(5):
        training.step()
    deadline = time.monotonic() + 12.0
    while time.monotonic() < deadline:
        for bound_ms, rows in seen.items():
            native.bound_launches(bound_ms / 1e3)
            training.step()
            synchronize()
            began_s = time.perf_counter()
            for _ in range(12):
                training.step()
            launched_s = time.perf_counter()
            synchronize()
            ended_s = time.perf_counter()
            rows.append((ended_s - began_s, ended_s - launched_s))
    native.bound_launches(0.0)
    result.add(rounds=len(seen[0]))
    for bound_ms, rows in seen.items():
        if bound_ms:
            pairs = zip(seen[0], rows, strict=True)
            ratio = statistics.median(plain[0] / bounded[0] for plain, bounded in pairs)
            result.add(**{f"throughput_ratio_bound_{bound_ms}": ratio})
        drains_ms = [1e3 * drain for _, drain in rows]
        result.add(**{f"drain_ms_bound_{bound_ms}": statistics.median(drains_ms)})


# --- 6: other people's loops


def frameworks(result: Result, folder: Path) -> None:
    """Stock Lightning and stock transformers under HYDROSLURM_PREEMPT=requeue: stopped by SIGTERM,
    started again, and compared with themselves undisturbed."""
    lanes = [("lightning",), ("transformers",)]
    lanes += [] if DRY else [("transformers", "--compile")]

    def start(lane: tuple[str, ...], run: Path) -> Child:
        framework, *flags = lane
        environ = {"HYDROSLURM_PREEMPT": "requeue", "HYDROSLURM_RUN_DIR": str(run / "run")}
        return Child("stock", run, framework, str(run / "output"), *flags, environ=environ)

    def judge(lane: tuple[str, ...]) -> None:
        name = "_".join(lane).replace("--", "")
        with result.trying(name):
            found, _, same = stopped_and_resumed(
                functools.partial(start, lane), folder / name, at=8, alone=DRY
            )
            result.add(**{f"{key}_{name}": value for key, value in found.items()})
            resumed = found["first_step_after_restart"] >= found["stopped_at_step"]
            result.require(**{f"resumed_{name}": resumed, f"bits_equal_{name}": same})

    with ThreadPoolExecutor(len(lanes)) as pool:
        list(pool.map(judge, lanes))


# --- 7: marks


def marks(result: Result, folder: Path) -> None:
    """A tool that listens to NVTX gets the marks of a pause, and of operators where they are asked
    for."""
    from hydroslurm.gate.build import find_compiler
    from hydroslurm.gate.library import installed_torch

    headers = installed_torch().nvtx
    assert headers is not None, "no NVTX headers: the gate emits no marks"
    library, heard = folder / "listener.so", folder / "heard"
    command = [*find_compiler(os.environ), "-std=c++17", "-O1", "-fPIC", "-shared", "-isystem"]
    command += [str(headers), str(HERE / "nvtx_listener.cpp"), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    environ = {
        "NVTX_INJECTION64_PATH": str(library),
        "NVTX_LISTENER_FILE": str(heard),
        "HYDROSLURM_NVTX": "operators",
    }
    _, same = pauses(folder, size="small", count=2, environ=environ)
    said = set(heard.read_text().splitlines())
    wanted = {"mark pause_request", "mark gate_closed", "mark at_rest", "mark gate_opened"}
    wanted |= {"mark resume_request", "begin pausing", "begin resuming"}
    wanted |= set() if DRY else {"begin draining"}
    operators = {one for one in said if one.startswith("push aten::")}
    result.add(operators_heard=len(operators), heard=sorted(wanted & said))
    result.require(
        marks_are_heard=wanted <= said,
        operators_are_heard=len(operators) > 5,
        bits_equal_with_listener=same,
    )


# --- 8: one rank of several


def ranks(result: Result, folder: Path) -> None:
    """FSDP2 and DDP of one rank over NCCL: paused, asked to vacate, stopped and resumed. Whether
    NCCL can be suspended depends on torch and NCCL: a refusal is a finding, not a failure."""
    names = ("ddp",) if DRY else ("ddp", "fsdp2")
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(functools.partial(_one_of_ranks, result, folder), names))


def _one_of_ranks(result: Result, folder: Path, name: str) -> None:
    environ = {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(processes.free_port()),
    }  # fmt: skip

    def start(run: Path) -> Child:
        return trains("run", run, ranks=name, steps=16, every=7, environ=environ)

    def pause(child: Child) -> None:
        answer = client.pause(child.pid, timeout_s=LIMIT_S)
        result.require(**{f"parked_{name}": answer.done})
        client.resume(child.pid, timeout_s=LIMIT_S)
        if DRY:
            return
        answer = client.pause(child.pid, vacate=True, timeout_s=LIMIT_S)
        said = "" if answer.done else answer.message
        result.add(**{f"vacated_{name}": answer.done, f"vacate_said_{name}": said})
        client.resume(child.pid, timeout_s=LIMIT_S)

    with result.trying(name):
        found, child, same = stopped_and_resumed(start, folder / name, at=8, pause=pause)
        result.require(**{f"bits_equal_{name}": same})
        found = stop_of_a_run(folder / name, child, found)
        result.add(**{f"{key}_{name}": value for key, value in found.items()})


# --- 9: gradients reduced on the host


def host_reduce(result: Result, _: Path) -> None:
    """Eight ranks share the device, as two nodes: their gradients are gloo's. A step's time."""
    command = [sys.executable, str(HERE.parent / "host_reduce.py"), "--quick", "--json"]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=START_S)
    found = json.loads(said.stdout.splitlines()[-1])
    result.add(host_reduce_step_ratio_to_gloo=found["step_ratio_to_gloo"])


# --- 10: frozen weights


def frozen(result: Result, folder: Path) -> None:
    """The fingerprint of weights that are not trained: its speed, that it sees one value, and that
    the third checkpoint links the first one's files."""
    from hydroslurm.checkpoint.frozen import fingerprint
    from hydroslurm.checkpoint.save import SaveRequest, write_checkpoint
    from hydroslurm.checkpoint.store import CheckpointStore, State
    from hydroslurm.checkpoint.write_plan import divide

    size_bytes = 2**24 if DRY else 4 * GIB
    base = {f"w{n}": torch.randn(size_bytes // 64, device=DEVICE).bfloat16() for n in range(32)}
    pointers = {one.data_ptr() for one in base.values()}

    def state(tensors: Mapping[str, torch.Tensor], step: int) -> State:
        trained = torch.full((64,), float(step), device=DEVICE)
        return State(shared={"model": {**tensors, "t": trained}}, own={}, frozen=pointers)

    plan, took_s, found = divide(state(base, 0), rank=0, world_size=1), [], set()
    for _ in range(4 if DRY else 7):
        synchronize()
        began_s = time.perf_counter()
        found.add(fingerprint(plan))
        took_s.append(time.perf_counter() - began_s)
    base["w3"][5] += 1
    changed = fingerprint(plan) not in found
    base["w3"][5] -= 1
    total_gb = sum(one.nbytes for one in base.values()) / GB
    result.add(
        frozen_gb=total_gb, fingerprint_ms_per_gb=1e3 * statistics.median(took_s[2:]) / total_gb
    )
    result.require(fingerprint_is_stable=len(found) == 1, fingerprint_sees_one_value=changed)
    if not DRY:
        rate = _link_gb_per_s(int(total_gb * GB))["to_host"]
        result.add(pinned_copy_ms_per_gb=1e3 / rate)
    small = {name: one[: 2**16].clone() for name, one in base.items()}
    pointers = {one.data_ptr() for one in small.values()}
    store = CheckpointStore(folder / "store")
    written = [
        write_checkpoint(store, state(small, step), SaveRequest(step, "periodic"))
        for step in range(3)
    ]
    first, third = written[0].path, written[2].path
    both = [one for one in third.iterdir() if (first / one.name).exists()]
    linked = [one for one in both if one.samefile(first / one.name)]
    again = store.load(written[2]).shared["model"]["w3"]
    result.require(
        frozen_files_are_linked=len(linked) == 2, frozen_loads=torch.equal(again, small["w3"].cpu())
    )


PARTS = (gate, overhead, run, vacate, launch_ahead, host_reduce, frameworks, marks, ranks, frozen)


def main(name: str, folder: str, path: str) -> int:
    random.seed(0)
    result = Result(Path(path))
    with result.trying(name), tempfile.TemporaryDirectory(dir=folder) as own:
        next(one for one in PARTS if one.__name__ == name)(result, Path(own))
    return 1 if result.failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Run the parts one after the other, the most important first, each in a process of its own with a
limit of its own; print a line of JSON after each, and a table last."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import environment

HERE = Path(__file__).resolve().parent
LIMITS_S = {
    "gate": 110.0,
    "overhead": 70.0,
    "run": 100.0,
    "vacate": 180.0,
    "launch_ahead": 70.0,
    "host_reduce": 60.0,
    "frameworks": 140.0,
    "marks": 70.0,
    "ranks": 120.0,
    "frozen": 50.0,
}
"""Of each part, which usually takes half of it."""
SIDE_BY_SIDE = ("frameworks", "marks", "ranks")
"""They look for what is wrong, not for how long it takes."""
WHOLE_S = 465.0
"""Of all parts together; what is before and after them takes a few seconds more."""
DRY_WHOLE_S, DRY_FACTOR = 1200.0, 4.0
"""Two cores that others use as well may take so much longer than a machine with a device."""
MOST_LOG_BYTES = 1 << 20
DRY_ENV = "HYDROSLURM_GPU_DRY"
FOREIGN = ("HYDROSLURM_", "SLURM_", "SUBMITIT_", "TORCHELASTIC_", "MASTER_", "NVTX_")
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def main() -> int:
    chosen = _arguments()
    work, out = chosen.work, chosen.out
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.txt").unlink(missing_ok=True)
    environ = _environ(work, dry=chosen.dry)
    facts = environment() | _device(dry=chosen.dry)
    if not chosen.dry and not facts["device"]:
        print("no CUDA device that this torch can use; --dry runs what a CPU can", file=sys.stderr)
        return 2
    began_s = time.monotonic()
    deadline = began_s + (DRY_WHOLE_S if chosen.dry else WHOLE_S)
    lines = []

    def run(name: str) -> dict[str, Any]:
        limit_s = LIMITS_S[name] * (DRY_FACTOR if chosen.dry else 1.0)
        line = {"script": "gpu", "part": name, "dry": chosen.dry}
        return line | _run_part(name, work, environ, min(limit_s, deadline - time.monotonic()))

    names = [name for name in LIMITS_S if name in (chosen.only or LIMITS_S)]
    groups = [[name] for name in names if chosen.dry or name not in SIDE_BY_SIDE]
    if together := [name for name in names if [name] not in groups]:
        groups.insert(-1 if "frozen" in names else len(groups), together)
    with (out / "results.jsonl").open("w") as results, (out / "log.txt").open("wb") as log:
        for group in groups:
            with ThreadPoolExecutor(len(group)) as pool:
                for line in pool.map(run, group):
                    lines.append(line)
                    text = json.dumps({**line, "environment": facts})
                    print(text, file=results, flush=True)
                    print(text, flush=True)
            for name in group:
                text = (work / f"{name}.log").read_bytes()[-MOST_LOG_BYTES:]
                log.write(f"===== {name}\n".encode() + text + b"\n")
                log.flush()
    table = _table(lines, facts, time.monotonic() - began_s)
    (out / "table.txt").write_text(table)
    print(table, flush=True)
    return 0 if all(line["ok"] for line in lines) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="profiling/gpu.sh", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="on the CPU, as far as that goes")
    parser.add_argument("--only", action="append", choices=LIMITS_S, help="may be given again")
    parser.add_argument("--out", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, required=True, help=argparse.SUPPRESS)
    return parser.parse_args()


def _environ(work: Path, *, dry: bool) -> dict[str, str]:
    """Of the parts: nothing of a job or of another training, and sums that do not vary."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN) and k not in RANKS}
    environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    environ["TMPDIR"] = str(work)
    if dry:
        environ |= {DRY_ENV: "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    else:
        environ["XDG_CACHE_HOME"] = str(work / "cache")  # the gate is built, and that is timed
    return environ


def _device(*, dry: bool) -> dict[str, Any]:
    """What the figures depend on besides :func:`harness.environment`; opens no context."""
    import torch

    facts: dict[str, Any] = {"device": None, "cuda": torch.version.cuda}
    if dry:
        return facts
    fields = "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current"
    try:
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        row = [one.strip() for one in said.stdout.splitlines()[0].split(",")]
        facts |= {"device": row[0], "driver": row[1], "device_mib": row[2], "pcie": row[3:]}
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        print(f"nvidia-smi: {error}", file=sys.stderr)
        if torch.cuda.is_available():
            facts["device"] = torch.cuda.get_device_name()
    try:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:  # a torch without it
        facts["nccl"] = f"none: {error}"
    return facts


def _run_part(name: str, work: Path, environ: Mapping[str, str], limit_s: float) -> dict[str, Any]:
    """Run it, and whatever becomes of it return what it has found."""
    path, said = work / f"{name}.json", work / f"{name}.log"
    said.touch()
    began_s, status = time.monotonic(), "no time was left for it"
    if limit_s > 5.0:
        with said.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "parts.py"), name, str(work), str(path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                cwd=work,
                start_new_session=True,
            )
            try:
                status = f"exit status {process.wait(timeout=limit_s)}"
            except subprocess.TimeoutExpired:
                status = f"ended at its limit of {limit_s:.0f} s"
            finally:  # with all that it has started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            try:
                process.wait(timeout=10.0)
            except subprocess.TimeoutExpired:
                status += ", and cannot be killed"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    failures = [line["failure"] for line in lines if "failure" in line]
    if status != "exit status 0" and (not failures or status != "exit status 1"):
        failures.append(status)
    figures = {key: line[key] for line in lines for key in line if key != "failure"}
    took_s = round(time.monotonic() - began_s, 1)
    return {"ok": not failures, "took_s": took_s, "failures": failures, **figures}


def _table(lines: list[dict[str, Any]], facts: Mapping[str, Any], took_s: float) -> str:
    rows = [f"{facts['device'] or 'no device'}, torch {facts['torch']}, CUDA {facts['cuda']}"]
    for line in lines:
        verdict = "ok" if line["ok"] else "FAILED"
        rows.append(f"\n{line['part']}: {verdict} in {line['took_s']} s")
        rows += [f"  ! {one}" for one in line["failures"]]
        skipped = ("script", "part", "dry", "ok", "took_s", "failures")
        rows += [f"  {key:<44} {value}" for key, value in line.items() if key not in skipped]
    failed = [line["part"] for line in lines if not line["ok"]]
    verdict = f"failed: {', '.join(failed)}" if failed else "all passed"
    rows.append(f"\n{took_s:.0f} s; {verdict}")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())

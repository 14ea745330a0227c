"""HYDROSLURM_PREEMPT in ordinary Python processes: who becomes pausable, who does not, and when."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import captured, child

from hydroslurm.runtime import autoload

ASKED = {"HYDROSLURM_PREEMPT": "pause"}
# says whether this process waits for torch, without importing anything of weight
WAITS = (
    "print(any('hydroslurm' in type(f).__module__ for f in sys.meta_path), 'torch' in sys.modules)"
)


def python(*argv: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """One Python to its end."""
    return captured([sys.executable, *argv], env={**os.environ, **environ}, cwd=cwd, timeout=120)


@pytest.mark.parametrize("value", [None, "", "0", "OFF"])
def test_not_asked_for_is_nothing_at_all(value: str | None) -> None:
    """No module of ours is imported, and nothing waits, unless it is asked for in so many words."""
    environ = {} if value is None else {"HYDROSLURM_PREEMPT": value}
    code = f"import sys; {WAITS}; print('hydroslurm.runtime.install' in sys.modules)"
    done = python("-c", code, **environ)
    assert (done.stdout, done.stderr) == ("False False\nFalse\n", "")
    if value is None:
        code = "import sys; print([m for m in sys.modules if 'hydroslurm' in m])"
        assert python("-c", code).stdout == "[]\n"


@pytest.mark.parametrize("options", [[], ["-I"], ["-S"]])
def test_asked_for_waits_and_imports_nothing_of_weight(options: list[str]) -> None:
    """Until torch is imported there is one small module more, and it never imports torch. Isolated
    from the user's settings it is there, too; without site-packages it is not."""
    code = f"import sys; {WAITS}; print(sorted(m for m in sys.modules if 'hydroslurm' in m))"
    done = python(*options, "-c", code, **ASKED)
    waits = options != ["-S"]
    modules = ["hydroslurm", "hydroslurm.runtime", "hydroslurm.runtime.autoload"] if waits else []
    assert done.stdout.splitlines() == [f"{waits} False", str(modules)]
    assert done.stderr == ""


def test_an_unknown_word_is_said_once_and_does_no_harm() -> None:
    """One line names the words that are known, and the program runs; also where there is nobody to
    tell."""
    done = python("-c", f"import sys; {WAITS}", HYDROSLURM_PREEMPT="pausee")
    assert done.stdout == "False False\n"
    assert done.stderr.count("\n") == 1
    assert "'pausee' is not known; wanted pause, vacate, requeue or off" in done.stderr
    shell = f'exec 2>&-; exec "{sys.executable}" -c "print(1)"'
    environ = {**os.environ, "HYDROSLURM_PREEMPT": "x" * 5000}
    assert captured(["sh", "-c", shell], env=environ, timeout=120).stdout == "1\n"


# --- with a torch that is a file of ours: how it is found and fails
# --------------------------------------------------------------------------------------------------


def _with_torch(folder: Path, source: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run a program with a package torch that consists of ``source``."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(source)
    return python("-c", code, PYTHONPATH=str(folder), **ASKED)


def test_a_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    """The script gets torch's own error, as often as it tries; one that works in the end is
    followed."""
    code = f"""
import sys
for _ in range(2):
    try:
        import torch
    except ImportError as error:
        print(error)
    {WAITS}
sys.path.insert(0, "second")
sys.broken = False
import torch
print(torch.__loader__ is torch.__spec__.loader, "exec_module" in vars(torch.__loader__))
"""
    source = "import sys\nif getattr(sys, 'broken', True):\n    raise ImportError('no libfoo')\n"
    done = _with_torch(tmp_path, source, code)
    assert done.stdout.splitlines() == ["no libfoo", "True False"] * 2 + ["True False"]
    assert done.stderr.count("\n") == 1  # this one has no operators to pause at
    assert "hydroslurm: this process could not be made preemptible" in done.stderr


def test_looking_for_torch_is_not_importing_it(tmp_path: Path) -> None:
    """Libraries ask whether there is a torch first, and see its own loader; nothing is lost by
    it. Without one there is none."""
    code = f"""
import importlib.util, sys
from importlib.machinery import SourceFileLoader
spec = importlib.util.find_spec("torch")
print(type(spec.loader) is SourceFileLoader, spec.loader.get_filename() == spec.origin)
{WAITS}
import torch
{WAITS}
"""
    done = _with_torch(tmp_path, "", code)
    assert done.stdout.splitlines() == ["True True", "True False", "False True"]
    none = "import importlib.util as u, sys; sys.path[:] = []; print(u.find_spec('torch'))"
    done = python("-c", none, **ASKED)
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_frameworks_are_given_to_their_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are imported already, as a function that was unpickled has done, and those that
    come later; each once, and then nobody looks any more."""
    (tmp_path / "adapter_x.py").write_text("def install(module): module.count += 1")
    for name in ("early_x", "late_x"):
        (tmp_path / f"{name}.py").write_text("count = 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(autoload, "_ADAPTED", dict.fromkeys(("early_x", "late_x"), "adapter_x"))
    before = list(sys.meta_path)
    early = importlib.import_module("early_x")
    autoload.adapt()
    late = importlib.import_module("late_x")
    assert (early.count, late.count) == (1, 1)
    assert sys.meta_path == before


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_not_collected_while_torch_is_imported(tmp_path: Path, *, enabled: bool) -> None:
    """What the import has made is frozen behind it, and the collector is as the script had it,
    also behind an import that fails; a script that has switched it off has its reasons."""
    code = f"""
import gc, sys
{"" if enabled else "gc.disable()"}
sys.broken = True
try:
    import torch
except ImportError:
    print(gc.isenabled(), gc.get_freeze_count() > 0)
sys.broken = False
import torch
print(torch.enabled, gc.isenabled(), gc.get_freeze_count() > 0)
"""
    source = "import gc, sys\nenabled = gc.isenabled()\nif sys.broken:\n    raise ImportError\n"
    done = _with_torch(tmp_path, source, code)
    assert done.stdout == f"{enabled} False\nFalse {enabled} {enabled}\n"
    plain = python("-c", code, PYTHONPATH=str(tmp_path), HYDROSLURM_PREEMPT="")
    assert plain.stdout == f"{enabled} False\n{enabled} {enabled} False\n"


@pytest.mark.parametrize("argv", [["torchrun"], ["-mtorch.distributed.run"]])
def test_launchers_are_no_ranks(argv: list[str], tmp_path: Path) -> None:
    """torchrun imports torch and is left alone, as a program and as a module."""
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "run.py").write_text(
        "import os, sys; print(sorted(v for v in os.environ if 'TAKEN' in v))"
    )
    (tmp_path / "torchrun").write_text("import torch.distributed.run")
    environ = {**os.environ, **ASKED, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, *argv, "--nproc-per-node=2", "x"]
    done = captured(command, cwd=tmp_path, env=environ, timeout=120)
    assert (done.stdout, done.stderr) == ("[]\n", "")


# --- with the real one
# --------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, signal, subprocess, sys, threading

WAITS = "any('hydroslurm' in type(f).__module__ for f in sys.meta_path)"


class Items:
    # pickled by name: what a worker sees of itself
    def __len__(self):
        return 2

    def __getitem__(self, i):
        from hydroslurm.runtime.install import is_installed

        os.kill(os.getpid(), signal.SIGUSR1)  # meant for the rank; harms no worker
        is_child = os.getpid() != int(os.environ["RANK_PID"])
        return [float(is_installed()), float(eval(WAITS)), float(is_child)]


def main():
    assert signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ())  # it waits
    os.environ["RANK_PID"] = str(os.getpid())
    seen = {}
    # two threads want torch at the same time
    first = threading.Thread(target=lambda: __import__("torch"))
    first.start()
    import torch
    first.join()
    import hydroslurm
    from hydroslurm.runtime import install as installation

    seen["installed"] = installation.is_installed(), installation.gives_way()
    child = [sys.executable, "-c", "import sys; print(" + WAITS + ")"]
    seen["child"] = subprocess.run(child, capture_output=True, text=True).stdout.strip()
    from torch.utils.data import DataLoader

    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Items(), num_workers=1, multiprocessing_context=method)
        rows = torch.stack([torch.stack(row) for row in loader])
        seen[method] = rows.flatten(1).tolist()
    before = hydroslurm.controller()
    hydroslurm.od_execution_wrapper(torch.nn.Linear(2, 2), gate="native")
    seen["explicit"] = hydroslurm.controller() is before, installation.gives_way()
    try:
        hydroslurm.install()
    except hydroslurm.HydroslurmError as error:
        seen["again"] = type(error).__name__
    hydroslurm.uninstall()
    seen["then"] = installation.is_installed()
    print(json.dumps(seen), flush=True)
    os.execv(sys.executable, [sys.executable, __file__, "again"])


if __name__ == "__main__":
    if sys.argv[1:] == ["again"]:
        print("after exec", eval(WAITS), flush=True)
    else:
        main()
"""


def test_a_rank_and_its_children(tmp_path: Path) -> None:
    """Two threads import torch at once, and it is installed once. DataLoader workers of every kind
    and other Pythons are not, and survive the pause signal. A call of the script's own gets
    what is there, and a second one is refused. After exec the process is still a rank."""
    with child(PROGRAM, tmp_path, environ=ASKED) as program:
        seen: dict[str, Any] = json.loads("{" + program.expect("{"))
        assert seen["installed"] == [True, True]
        assert seen["child"] == "False"
        for method in ("fork", "spawn", "forkserver"):
            assert seen[method] == [[0.0, 0.0, 1.0]] * 2, method
        assert seen["explicit"] == [True, False]
        assert seen["again"] == "AlreadyInstalled"
        assert seen["then"] is False
        assert program.expect("after exec") == "True"
        assert program.wait() == 0


LOOP = """
import torch
print("imported", flush=True)
x = torch.ones(2)
while True:
    x = x + 1
"""


OF_TWO = {"RANK": "0", "WORLD_SIZE": "2", "HYDROSLURM_RUN_DIR": "first"}
CALLS = """
import json, os, signal, sys
import torch, hydroslurm
from hydroslurm.core.status import read_status
from processes import wait_until

def said(folder):
    return read_status(folder + "/events/rank-00000.json")

before = hydroslurm.controller()
os.kill(os.getpid(), signal.SIGUSR1)
wait_until(lambda: said("first").state == "parked", "the pause is written")
for options in sys.argv[1:]:
    try:
        mine = hydroslurm.install(**eval(options))
    except ValueError as error:
        print("refused", error)
        continue
    folder = "mine" if os.path.exists("mine") else "first"
    print(mine is before, folder, "user" in said(folder).causes, mine.ranks is None)
    os.kill(os.getpid(), signal.SIGUSR2)
    wait_until(lambda: not said(folder).causes, "the resume is written")
    print("then", said("first").state)
"""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["{'gate': 'hooks'}", "{'signals': hydroslurm.SignalPlan(warning=None)}", "{}"],
            "refused HYDROSLURM_PREEMPT has made this process pausable with the native gate. "
            "Choose for both by HYDROSLURM_GATE=hooks, or set HYDROSLURM_PREEMPT=off / "
            "refused HYDROSLURM_PREEMPT has made this process pausable with other signals. Choose "
            "for both by HYDROSLURM_SIGNALS=NAME=SIGNAL,..., or set HYDROSLURM_PREEMPT=off / "
            "True first True False / then running",
        ),
        (["{'run_dir': 'mine'}"], "True mine True False / then ended"),
        (["{'alone': True}"], "True first True True / then running"),
    ],
)
def test_a_call_of_the_scripts_own(options: list[str], words: str, tmp_path: Path) -> None:
    """It returns the controller that is there, and a pause that is on stays on. Events go where the
    call says, how things stand first; alone, it leaves the other ranks. What cannot change is
    refused, with the remedy."""
    path = str(Path(__file__).parents[2])
    done = python("-c", CALLS, *options, cwd=tmp_path, PYTHONPATH=path, **ASKED, **OF_TWO)
    assert done.stdout.splitlines() == words.split(" / "), done.stderr


def test_a_call_for_two_ranks_over_the_gate_of_one(tmp_path: Path) -> None:
    """It is refused, with the remedy: the gate of module hooks holds one rank."""
    code = "import torch, hydroslurm; hydroslurm.install(alone=False)"
    one = {"HYDROSLURM_ALONE": "1", "HYDROSLURM_GATE": "hooks"}
    done = python("-c", code, cwd=tmp_path, **ASKED, **OF_TWO, **one)
    assert done.stderr.splitlines()[-1].endswith(
        ": HYDROSLURM_PREEMPT has made this process pausable with the hooks gate, which holds one "
        "rank, and 2 pause together here. Choose for both by HYDROSLURM_GATE=native, or set "
        "HYDROSLURM_PREEMPT=off"
    )


@pytest.mark.parametrize("mode", ["pause", "requeue"])
def test_who_cannot_save_ends_by_sigterm(mode: str, tmp_path: Path) -> None:
    """In both modes the script parks and goes on; SIGTERM ends it as it would without us, paused
    or not."""
    from hydroslurm.runtime import client

    with child(LOOP, tmp_path, environ={"HYDROSLURM_PREEMPT": mode}) as program:
        program.expect("imported")
        assert client.pause(program.pid, timeout_s=60).done
        assert client.resume(program.pid, timeout_s=60).done
        if mode == "pause":
            assert client.pause(program.pid, timeout_s=60).done
        program.signal(signal.SIGTERM)
        assert program.wait() == -signal.SIGTERM


def test_what_fails_is_one_line(tmp_path: Path) -> None:
    """A setting that cannot be used is named, and the script runs to its end."""
    code = "import torch; print(int(torch.ones(3).sum()))"
    done = python("-c", code, HYDROSLURM_SIGNALS="nonsense", **ASKED)
    assert (done.stdout, done.returncode) == ("3\n", 0)
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("hydroslurm: this process could not be made preemptible: ")
    assert "HYDROSLURM_SIGNALS" in done.stderr


RANKS = """
import json, os, sys
import torch
import torch.distributed as dist
import hydroslurm
from hydroslurm.runtime import install as installation

unasked = installation.gives_way()
together = hydroslurm.controller().ranks.wait_for_all(timeout_s=60)
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
with hydroslurm.Run(model=model, directory=sys.argv[1]) as run:
    run.resume()
    run.step += 1
    run.safe_point()
    mine = hydroslurm.controller()
    seen = [unasked, together, installation.gives_way(), mine.ranks.wait_for_all(timeout_s=60)]
with open(f"{sys.argv[1]}-{os.environ['RANK']}", "w") as file:
    json.dump(seen, file)
dist.destroy_process_group()
"""


def test_torchrun_and_a_run_of_the_scripts_own(tmp_path: Path) -> None:
    """torchrun's workers are ranks and find each other, its agent is none; a Run that is made later
    has its ranks still joined."""
    (tmp_path / "train.py").write_text(RANKS)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = python(*torchrun, str(tmp_path / "train.py"), str(tmp_path / "run"), **ASKED)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"run-{rank}").read_text()) == [True, True, False, True]
    events = sorted(path.name for path in (tmp_path / "run" / "events").glob("*.jsonl"))
    assert events == ["rank-00000.jsonl", "rank-00001.jsonl"]

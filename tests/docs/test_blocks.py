"""Every block of README and docs/ runs as it is printed, or says in its page why it does not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from clusters import Part
from docs.blocks import PAGES, ROOT, blocks_of, python_program, shell_program
from zygote import ran

SHOWN_ONLY = {"", "text"}
SLOW = (
    "sed 's/default=0.0/default=0.02/; s/default=30/default=300/' examples/train_run.py >train.py"
)
"""A training that takes minutes."""
TRAINED = """
cp examples/train_run.py train.py
hydroslurm submit --partition low train.py --epochs 3
hydroslurm logs -f $(newest)
"""
PREPARED_SHELL = {
    "docs/doctor.md": TRAINED,
    "docs/index.md": SLOW,
    "docs/own-loop.md": SLOW,
    "docs/quickstart.md": """
unset ${!SBATCH_*} ${!SALLOC_*} ${!SLURM_*}  # it starts its own Slurm
trap 'hydroslurm cluster down; end' EXIT
""",
    "docs/unmodified-scripts.md": """
cat >train.py <<END
import sys, time
if "--epochs" in sys.argv:  # what is paused
    import torch
    loss = torch.ones(2)
    while True:
        loss = loss + 1
        print("step loss", loss, flush=True)
        time.sleep(0.01)
else:
    print("step 1 loss 1")
END
printf '#!/bin/bash\\nsrun python train.py\\n' >job.sh
hydroslurm run -- python train.py --epochs 10 >/dev/null & PID=$!
""",
}
"""What a reader of the page has done before."""
LONG = {"docs/index.md", "docs/own-loop.md", "docs/quickstart.md"}
"""Pages whose trainings take a minute."""
ONE_RANK = """
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", GLOO_SOCKET_IFNAME="lo")
"""
PREPARED_PYTHON = {
    "docs/own-loop.md": """
actor = critic = environment = nn.Linear(4, 2)
actor_optimizer = critic_optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
numpy_generator = numpy.random.default_rng(0)
train_one_step = evaluate = lambda: None
""",
    "docs/elastic.md": ONE_RANK,
    "docs/records.md": """
os.makedirs("data")
images = [bytes([number]) * 8 for number in range(256)]
decode = len
first_epoch, epochs, step = 0, 2, 1
""",
    "docs/numa-and-host-reduce.md": ONE_RANK
    + """dist.init_process_group("gloo")
""",
    "docs/lightning.md": "import lightning as L",
}
"""What fragments of the page take for granted, besides the usual."""
NOT_RUN = {
    "needs a GPU": 3,
    "needs root": 2,
    "needs jq": 1,
    "needs squashfs-tools": 1,
    "needs torchtitan": 1,
    "needs a file system that nodes share": 1,
}
"""Reasons that pages give, and how many blocks have each."""


def _pages(*languages: str) -> list[str]:
    """Pages with a block of these languages that is run here."""
    return [
        page
        for page in PAGES
        if any(block.language in languages and not block.how for block in blocks_of(page))
    ]


def test_every_block_runs_or_says_why_not() -> None:
    """The reasons are those listed here. A test that is named to run a block exists and knows the
    page, a verb or a script of the block."""
    blocks = [block for page in PAGES for block in blocks_of(page)]
    assert len(blocks) > 100
    assert {block.language for block in blocks} <= {"bash", "python", "yaml", "diff", *SHOWN_ONLY}
    reasons = Counter(block.what for block in blocks if block.how == "not run")
    assert reasons == NOT_RUN
    for block in blocks:
        if block.how == "run by":
            test = (ROOT / block.what).read_text()
            words = set(re.findall(r"^hydroslurm (\w+)|(\w+\.sbatch)", block.text, flags=re.M))
            known = [Path(block.page).name, *map("".join, words)]
            runs = not words or any(word in test for word in known)
            assert runs, f"{block.what} runs nothing of {block.place}"
        elif block.language == "diff":
            assert block.how == "run", block.place


@pytest.mark.slurm
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.long] if page in LONG else [])
        for page in _pages("bash", "yaml")
    ],
)
def test_shell_blocks(page: str, ranks_cluster: Part, tmp_path: Path) -> None:
    """The page's commands, one after the other, in a newcomer's copy of the repository."""
    for name in ("examples", "sbatch"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "train.py").write_text("print('step 1 loss 1', flush=True)\n")
    environ = {**ranks_cluster.child_environ(), "USER": "newcomer"}
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ["PATH"]])
    command = ["bash", "-c", shell_program(page, PREPARED_SHELL.get(page, ""))]
    with (tmp_path / "printed").open("w+") as printed:  # a pipe is held by what goes on behind it
        pipes = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": printed}
        done = subprocess.run(command, cwd=tmp_path, env=environ, timeout=800, **pipes)
        printed.seek(0)
        assert done.returncode == 0, printed.read()


@pytest.mark.parametrize("page", _pages("python"))
def test_python_blocks(page: str, tmp_path: Path) -> None:
    """The page's fragments and scripts, in one process that has what fragments take for granted."""
    script = tmp_path / "page.py"
    program = python_program(page, PREPARED_PYTHON.get(page, ""))
    script.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{program}")
    done = ran([script])
    assert done.returncode == 0, done.stdout + done.stderr

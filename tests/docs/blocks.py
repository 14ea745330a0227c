"""The fenced blocks of README and docs/, and the program that runs those of one page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
)
_BLOCK = re.compile(
    r"^(?:<!-- (?P<how>not run|run by|run): (?P<what>.*?) -->\n)?"
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    flags=re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """One block of a page.

    Attributes:
        language: what stands behind the fence; "" and text are shown only.
        how: "" for a block that runs as it stands; "not run", with the reason in ``what``; "run by"
            a test file; "run" by test_other_systems.py, under the name ``what``.
        line: of the fence, from 1.
    """

    page: str
    line: int
    language: str
    text: str
    how: str
    what: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = []
    for one in _BLOCK.finditer(text):
        line = text.count("\n", 0, one.start("language")) + 1
        how, what = one["how"] or "", one["what"] or ""
        found.append(Block(page, line, one["language"], one["text"], how, what))
    return found


SHELL = r"""
set -eE
pip() { :; }       # the tests' environment has what these would install
make() { :; }
newest() {
    squeue -h -t all -o '%A %P %Z' |
        awk -v here="$PWD" '$2 == "low" && $3 == here {print $1}' | sort -n | tail -1
}
folder() { ls -d runs/*/ hydroslurm-runs/*/ 2>/dev/null | tail -1; }
trap 'echo "the block at $block failed" >&2' ERR
end() {
    jobs -p | xargs -r kill -KILL || true
    squeue -h -o '%A %Z' | awk -v here="$PWD" '$2 == here {print $1}' | xargs -r scancel
}
trap end EXIT
mkdir -p .venv/bin && touch .venv/bin/activate
"""
"""What every page's shell begins with: a reader puts in the newest job for 123, and its folder for
RUN_FOLDER."""

SPEC = "replicaSpecs:\n- template: {command: [python, train.py]}\n"
"""The rest of a job spec of which a page shows a part."""


def shell_program(page: str, prepared: str = "") -> str:
    """The page's shell blocks and job specs as one program."""
    lines = [SHELL, prepared]
    for block in blocks_of(page):
        if block.how:
            continue
        if block.language == "bash":
            text = re.sub(r"\b123\b", "$(newest)", block.text)
            text = re.sub(r"\bPID\b", "$PID", text.replace("RUN_FOLDER", "$(folder)"))
            lines.append(f"block={block.place}\n{text}")
        elif block.language == "yaml":
            spec = block.text if "replicaSpecs:" in block.text else SPEC + block.text
            lines.append(f"block={block.place}\ncat >job.yaml <<'JOB_SPEC'\n{spec}JOB_SPEC")
            lines.append("hydroslurm validate job.yaml")
    return "\n".join(lines)


PYTHON = """
import itertools, os, random
import hydroslurm, numpy, torch
import torch.distributed as dist
import torch.nn.functional as F
from hydroslurm.data import ResumableSampler
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dataset = data = TensorDataset(torch.rand(256, 8), torch.rand(256, 2))
model = net = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
loader = DataLoader(dataset, batch_size=64, sampler=ResumableSampler(dataset, seed=0))
"""
"""What a fragment of a training takes for granted."""


def python_program(page: str, prepared: str = "") -> str:
    """The page's Python blocks as one program. Each has a run folder of its own."""
    lines = [PYTHON + prepared]
    for number, block in enumerate(blocks_of(page)):
        if block.language == "python" and not block.how:
            lines.append(f"os.environ['HYDROSLURM_RUN_DIR'] = 'run-{number}'")
            lines.append(f"exec(compile({block.text!r}, {block.place!r}, 'exec'), globals())")
    return "\n".join(lines)

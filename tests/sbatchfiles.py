"""The batch scripts in sbatch/ with another command, for tests and benchmarks to submit."""

from __future__ import annotations

from pathlib import Path

SBATCH = Path(__file__).resolve().parent.parent / "sbatch"
REQUEUE = 'python3 -u examples/train_run.py "$@"'
"""What srun starts in sbatch/requeue.sbatch."""
MULTI_NODE = 'python3 -u examples/train_ddp.py "$@"'
"""What srun starts in sbatch/multi-node.sbatch."""


def requeue_script(command: str = REQUEUE) -> str:
    """sbatch/requeue.sbatch with another command."""
    text = (SBATCH / "requeue.sbatch").read_text()
    assert REQUEUE in text
    return text.replace(REQUEUE, command)


def multi_node_script(command: str = MULTI_NODE, *, nodes: int = 4) -> str:
    """sbatch/multi-node.sbatch with another command, on so many nodes."""
    text = (SBATCH / "multi-node.sbatch").read_text()
    assert MULTI_NODE in text
    assert "--nodes=4\n" in text
    return text.replace(MULTI_NODE, command).replace("--nodes=4\n", f"--nodes={nodes}\n")

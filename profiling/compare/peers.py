"""Who is compared, and how each is set up: as its own documentation says."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Peer:
    """One way to make a training preemptible.

    Attributes:
        title: for people.
        script: that trains, and its first argument; of submitit, that submits.
        signal: what ``sbatch --signal`` asks for, which this cluster sends at a preemption too.
        versions: distributions that it needs, whose versions are told; ``otherwise`` where there
            are none.
        pause: signals by which its documentation has it paused and continued; by default
            ``scontrol suspend`` and ``resume``.
        saves: globs of what a later attempt loads, once it is whole.
        remark: what has to be known to read its figures.
        nodes: that it trains on; events strike the job on the first.
        preempt: with ``HYDROSLURM_PREEMPT=requeue``, as ``srun --preempt=requeue`` sets it.
    """

    name: str
    title: str
    script: str
    saves: tuple[str, ...]
    remark: str
    signal: str = ""
    versions: tuple[str, ...] = ()
    otherwise: str = "–"
    pause: tuple[str, str] | None = None
    preempt: bool = False
    nodes: int = 1

    def version(self) -> str:
        """The versions of what it is made of."""
        found = [f"{name} {importlib.metadata.version(name)}" for name in self.versions]
        return ", ".join(found) or self.otherwise

    def saved(self, folder: Path) -> set[tuple[str, int, int]]:
        """What a later attempt could load now: path, inode and time of change."""
        found = set()
        for pattern in self.saves:
            for path in folder.glob(pattern):
                if (path.parent / "checkpoint-is-incomplete.txt").exists():
                    continue
                try:
                    status = path.stat()
                except FileNotFoundError:  # replaced or removed meanwhile
                    continue
                found.add((str(path), status.st_ino, status.st_mtime_ns))
        return found


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "hydroslurm",
            "hydroslurm",
            "peer_by_hand.py hydroslurm",
            ("run/checkpoints/step-*",),
            "Parks between two operators at SIGTSTP, before Slurm's SIGSTOP. Stops at the end of "
            "the step. Only its saves are synced to the disk and verified; the times of the others "
            "end when the file has its name.",
            signal="URG@90",
            versions=("hydroslurm",),
        ),
        Peer(
            "hydrojobsche",
            "HydroJobSche's way",
            "peer_by_hand.py hydrojobsche",
            ("checkpoint.pt",),
            "Rebuilt from its source (profiling/incumbent.py). It knows SIGUSR1 and SIGUSR2 only, "
            "so its pauses are `scancel --signal=USR1` and `USR2`, not `scontrol suspend`. It "
            "polls once a millisecond while it is held, and saves nothing at a preemption.",
            otherwise="rebuilt from its source",
            pause=("USR1", "USR2"),
        ),
        Peer(
            "submitit",
            "stock submitit",
            "peer_by_hand.py submitit",
            ("checkpoint.pt",),
            "Saves inside its signal handler, wherever the step is. It bypasses SIGTERM: an "
            "operator's requeue, which sends no user signal, kills it after KillWait. Suspended it "
            "is frozen like a bare script.",
            versions=("submitit",),
        ),
        Peer(
            "lightning",
            "Lightning",
            "peer_lightning.py",
            ("hpc_ckpt_*.ckpt", "epochs/last.ckpt"),
            "Saves inside its handler of SIGUSR1 and trains on until SIGTERM, which it minds at "
            "the end of a batch without saving. It goes on in mid-epoch with the loader's first "
            "samples again. Suspended it is frozen.",
            signal="USR1@90",
            versions=("lightning",),
        ),
        Peer(
            "lightning+hydroslurm",
            "Lightning + hydroslurm",
            "peer_lightning.py",
            ("run/checkpoints/step-*",),
            "The script of the row above, unchanged, with hydroslurm in its process.",
            signal="URG@90",
            versions=("lightning",),
            preempt=True,
        ),
        Peer(
            "transformers",
            "HF Trainer",
            "peer_transformers.py",
            ("trainer/checkpoint-*/trainer_state.json",),
            "enable_jit_checkpoint: waits 3 s after SIGTERM, training on, and saves at the end of "
            "a step. Suspended it is frozen.",
            signal="TERM@90",
            versions=("transformers", "accelerate"),
        ),
        Peer(
            "transformers+hydroslurm",
            "HF Trainer + hydroslurm",
            "peer_transformers.py",
            ("run/checkpoints/step-*",),
            "The script of the row above, unchanged, with hydroslurm in its process, which has "
            "enable_jit_checkpoint stand down.",
            signal="URG@90",
            versions=("transformers", "accelerate"),
            preempt=True,
        ),
        Peer(
            "torchft",
            "torchft, 2 nodes",
            "peer_torchft.py attempts",
            (),
            "Two replica groups on a node each, both training: events strike one, and the other "
            "goes on. Collectives time out after 5 s instead of a minute.",
            versions=("torchft",),
            nodes=2,
        ),
        Peer(
            "bare",
            "bare SIGSTOP",
            "peer_by_hand.py bare",
            ("checkpoint.pt",),
            "An unmodified script with a save per epoch. `scontrol suspend` freezes it wherever it "
            "is, inside an operator and with whatever locks it holds; SIGTERM kills it.",
        ),
    )
}

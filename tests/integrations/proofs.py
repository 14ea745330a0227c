"""A script whose stopped run has to be its undisturbed one, whatever framework it uses.

``hydroslurm prove``'s comparison says whether each step was trained once and with the same bits:
samples, random numbers, losses, weights, optimizers. Lines that the script prints after "=", and
what it writes into out/, have to be the same, too. Its attempts are forks of a process that has
the framework loaded.
"""

from __future__ import annotations

import difflib
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import zygote

from hydroslurm.prove import updates
from hydroslurm.prove.compare import compare

HERE = Path(__file__).parent
SCRIPTS = HERE.parent / "integration" / "scripts"
STOPPED = 75
LIGHTNING, TRANSFORMERS = ("lightning.pytorch", "torchmetrics"), ("transformers.trainer",)
ACCELERATE = ("accelerate",)
BOTH = (*LIGHTNING, *TRANSFORMERS)
OWN: tuple[str, ...] = ()
TRL = (*TRANSFORMERS, "trl.trainer.grpo_trainer", "trl.trainer.dpo_trainer", "pandas")


@dataclass(frozen=True)
class Row:
    """A training and where to stop it.

    Attributes:
        script: its name and arguments; of this folder, of structures/ or of integration/scripts.
        loads: the modules that its process has loaded.
        stops: see stops.py.
        trainings: more than one are compared by their lines alone, and what follows the last step
            of one that is done is done again.
        named: the text that is printed in its first epoch; "" for a row that has to be exact.
    """

    script: str
    loads: tuple[str, ...]
    stops: str
    ranks: int = 1
    trainings: int = 1
    named: str = ""

    def __str__(self) -> str:
        return f"{self.script}: {self.stops}" + f" of {self.ranks} ranks" * (self.ranks > 1)


def play(row: Row, folder: Path) -> tuple[dict[str, list[int]], str]:
    """The exit statuses of both runs of a row, and what was said. A script of this folder has one
    argument."""
    name, _, rest = row.script.partition(" ")
    if (HERE / name).exists():
        words = [HERE / name, rest]
    else:
        folder_of = SCRIPTS if (SCRIPTS / name).exists() else HERE / "structures"
        words = [folder_of / name, *shlex.split(rest)]
    ran = zygote.ran(
        [HERE / "attempts.py", folder, str(row.ranks), row.stops, *words], loads=row.loads
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1]), ran.stderr


def proved(row: Row, folder: Path) -> str:
    """What was said while the stopped run of a row was the undisturbed one, or while what it would
    lose was named."""
    exits, said = play(row, folder)
    if row.named:
        assert row.named in said, said
        return said
    assert exits["whole"] == [0] * row.ranks, said
    stopped, last = exits["stopped"][: -row.ranks], exits["stopped"][-row.ranks :]
    assert (set(stopped), set(last)) == ({STOPPED}, {0}), said
    if not row.stops.endswith("..."):
        assert len(stopped) == row.ranks * len(row.stops.split()), said
    if row.trainings == 1:
        require_same_steps(folder)
    for rank in range(row.ranks):
        whole, cut = (printed(folder / run / f"out-{rank}") for run in ("whole", "stopped"))
        cut = cut if row.trainings == 1 else list(dict.fromkeys(cut))
        assert cut == whole, "\n".join(difflib.unified_diff(whole, cut, lineterm=""))
    assert written(folder / "stopped") == written(folder / "whole")
    return said


def require_same_steps(folder: Path) -> None:
    """By what the recorder has written of them."""
    whole = updates.read(folder / "whole" / "attempt1")
    steps = len(whole[0])
    attempts = sorted((folder / "stopped").glob("attempt*"), key=lambda one: int(one.name[7:]))
    stopped = {rank: [updates.read(one).get(rank, []) for one in attempts] for rank in whole}
    generators = {"torch", "random", "numpy"}
    result = compare(whole, stopped, steps=steps, generators=generators)
    assert result.is_equal, "\n".join(map(str, result.differences)) or result
    assert result.compared == steps * len(whole) > 1


def printed(path: Path) -> list[str]:
    """The lines of an output that are to be the same."""
    return [line for line in path.read_text().splitlines() if line.startswith("=")]


def written(folder: Path) -> dict[str, str]:
    """The results of a run that are files."""
    return {one.name: one.read_text() for one in (folder / "work/out").glob("*") if one.is_file()}

"""Scripts of people who know nothing of hydroslurm, requeued six times by a real Slurm within two
epochs: by an operator, by an urgent job, and by a SIGTERM to the last rank only. Two of them leave
the loop to the user, and have the few lines that the pages on Fabric and on own loops show."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from clusters import Part
from integrations.stockjobs import StockJob, submitted

pytestmark = [pytest.mark.slurm, pytest.mark.long]

LIGHTNING = {
    "ranks 1, workers 0": "--workers=0 --pause-s=0.1",
    "ranks 1, workers 2, accumulated": "--workers=2 --accumulate=4 --pause-s=0.1",
    "ranks 2, workers 0, accumulated": "--workers=0 --accumulate=4 --pause-s=0.3 --devices=2",
    "ranks 2, workers 2": "--workers=2 --pause-s=0.2 --devices=2",
}
OTHERS = {
    "ranks 1, workers 0": "out --workers=0 --items=120 --pause-s=0.3",
    "ranks 1, workers 2, accumulated": "out --workers=2 --accumulate=4 --items=360 --pause-s=0.3",
    "ranks 2, workers 0, accumulated": "out --workers=0 --accumulate=4 --items=720 --pause-s=0.3",
    "ranks 2, workers 2": "out --workers=2 --items=240 --pause-s=0.3",
}
BATCHES = {  # a get_batch() has no workers and no epochs
    "ranks 1": "max_iters=60 gradient_accumulation_steps=1 pause_s=0.3",
    "ranks 1, accumulated": "max_iters=60 gradient_accumulation_steps=4 pause_s=0.3",
    "ranks 2": "max_iters=60 gradient_accumulation_steps=2 pause_s=0.3",
    "ranks 2, accumulated": "max_iters=60 gradient_accumulation_steps=8 pause_s=0.3",
}
CASES = [
    pytest.param(script, case, arguments, id=f"{script}: {case}")
    for script, cases in (
        ("lightning_digits.py", {name: f"--epochs=2 {one}" for name, one in LIGHTNING.items()}),
        ("lightning_manual.py", LIGHTNING),
        ("fabric_digits.py", LIGHTNING),
        ("hf_causal_lm.py", OTHERS),
        ("trl_sft.py", OTHERS),
        ("accelerate_loop.py", OTHERS),
        ("get_batch.py", BATCHES),
    )
    for case, arguments in cases.items()
]
BY = ("requeue", "signal", "urgent", "requeue", "signal", "requeue")


@pytest.mark.parametrize(("script", "case", "arguments"), CASES)
def test_six_requeues(
    script: str, case: str, arguments: str, requeue_cluster: Part, tmp_path: Path
) -> None:
    """The losses and the weights are those of a run that was left alone, on the other node."""
    ranks = int(case.split(",")[0].removeprefix("ranks "))
    alone, job = (
        submitted(requeue_cluster, tmp_path / node, script, arguments, ranks=ranks, node=node)
        for node in requeue_cluster.nodes
    )
    for number, by in enumerate(BY, start=1):
        job.wait_for_step(attempt=number)
        job.stop(by, rank=ranks - 1, node=requeue_cluster.nodes[1])
    assert job.wait_for_end() == "COMPLETED", job.output()
    assert alone.wait_for_end() == "COMPLETED", alone.output()
    assert f"attempt {len(BY) + 1} resumes from step" in job.output()
    assert "attempt 2" not in alone.output()
    found, wanted = results(job), results(alone)
    assert sorted(found) == sorted(wanted)
    assert not {one: (found[one], wanted[one]) for one in wanted if found[one] != wanted[one]}


def results(job: StockJob) -> Mapping[str, bytes | list[str]]:
    """What the script has written: losses and weights. Those of a ``get_batch()`` are printed."""
    names = ("**/final.pt", "logs/**/metrics.csv", "out/result.txt", "out/losses-*")
    found = {path for name in names for path in job.folder.glob(name)}
    assert found
    return {
        **{str(path.relative_to(job.folder)): path.read_bytes() for path in sorted(found)},
        "printed": re.findall(r"^iter \d+: loss \S+$", job.output(), flags=re.M),
    }

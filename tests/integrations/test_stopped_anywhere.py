"""Frameworks, stopped at all kinds of places: the attempts together are an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest
from integrations.proofs import ACCELERATE, BOTH, LIGHTNING, OWN, TRANSFORMERS, TRL, Row, proved


def lightning(scene: str, stops: str, ranks: int = 1, trainings: int = 1) -> Row:
    return Row(f"lightning_scenes.py {scene}", LIGHTNING, stops, ranks, trainings)


def transformers(scene: str, stops: str, ranks: int = 1, trainings: int = 1) -> Row:
    return Row(f"transformers_scenes.py {scene}", TRANSFORMERS, stops, ranks, trainings)


def loaders(way: str, ranks: int = 1) -> Row:
    """Several, each with a position of its own."""
    stops = "step:3 step:4 step:2" if ranks == 1 else "step:3@1 step:4@1 step:2@1"
    return Row(f"accelerate_loaders.py {way}", ACCELERATE, stops, ranks)


# in the first epoch, in the second, and at the end of it: three epochs of six steps
STOPS = "step:4 step:5 step:3"
LOADS = {"own": OWN, "lightning": LIGHTNING, "transformers": TRANSFORMERS, "accelerate": ACCELERATE}


def structure(framework: str, name: str, workers: str = "", named: str = "") -> Row:
    """A loop of this framework over one of structures.py."""
    script = f"loop_{framework}.py {name} {workers}".strip()
    return Row(script, LOADS[framework], STOPS, named=named)


def single(script: str, stops: str = STOPS, named: str = "") -> Row:
    """A script of structures/, whose name begins with its framework's."""
    return Row(script, LOADS[script.partition("_")[0]], stops, named=named)


STRUCTURES = [
    *(
        structure(framework, name, workers)
        for framework in LOADS
        for name in ("transforms", "curriculum", "stream", "collator", "weights", "buckets")
        for workers in ("", "persistent")
        if framework != "transformers" or name not in ("weights", "buckets")
    ),
    structure("own", "stream", "workers"),
    *(single(f"transformers_peft.py {kind}") for kind in ("lora", "dora", "adalora")),
    single("transformers_masked.py x"),
    single("transformers_masked.py x workers"),
    single("transformers_masked.py x persistent"),
    single("lightning_datamodule.py by-count", "step:4 step:5 step:9"),
    single("lightning_datamodule.py by-epoch", "step:4 step:5 step:9"),
    single("lightning_datamodule.py by-count every-2", "step:4 step:5 step:9"),
    single("lightning_pruned.py", named="ModelPruning puts no masks into a checkpoint"),
    single("lightning_finders.py rate", "step:12 step:25"),
    single("lightning_finders.py size", "step:3 step:2"),
]

ALWAYS = [
    # in the sanity check, in validation, at the ends of epochs
    lightning("plain", "eval:1 step:1 step:10 eval:2 epoch:1 eval:1 epoch:1"),
    lightning("stream", "step:3 step:8 eval:2 step:9"),
    lightning("thaw", "step:4 step:9 eval:1 step:3"),
    # with 3 ranks an order of sums matters: DDP has another one in its first step
    lightning("ddp", "step:2@2", 3),
    lightning("fsdp", "eval:3@0", 2),
    # before the first step, within one, at the ends of epochs, in evaluations
    transformers("plain", "start:1 step:2 forward:2 epoch:1 eval:2 step:2 epoch:1 eval:2"),
    transformers("own checkpoint", "step:9 epoch:1", trainings=2),
    # which trains with FSDP2 what a Trainer that nobody stops would
    transformers("fsdp2", "step:3@1", 2),
    Row("accelerate_loop.py out --workers 1 --accumulate 2", ACCELERATE, "step:2 step:1"),
    # behind the last batch of the one that leads, while the other one has some left, too
    Row("accelerate_loaders.py zip, the other first", ACCELERATE, "step:3 step:3 step:2"),
    loaders("now and then; accumulated, seeded"),
    single("accelerate_variables.py"),
]
SOMETIMES = [
    transformers("two trainers", "step:4 step:11", trainings=2),
    lightning("accumulate", "forward:4 step:1 eval:2 step:4"),
    lightning("workers", "step:5 eval:2 step:12"),
    lightning("max_steps", "step:6 step:5 step:9"),
    lightning("several", "step:4 step:7 step:9"),
    lightning("scaled", "forward:2 step:2 forward:7 step:9"),
    lightning("swa", "step:4 step:8 step:12"),
    lightning("fractions", "step:2 step:1 eval:5 step:5 step:9"),
    lightning("by hand", "step:2 step:7 step:20"),
    lightning("half", "eval:1 step:1 step:3 eval:1 step:4"),
    lightning("reload", "step:4 step:7 epoch:1"),
    lightning("own checkpoint", "step:8 eval:1 step:9", trainings=2),
    lightning("twice", "step:5 step:32 step:9", trainings=2),
    lightning("ddp", "step:1@1 eval:2@2 step:2@0", 3),
    lightning("ddp", "step:4@1 eval:1@1", 2),
    lightning("fsdp", "step:1@1 step:1@2 eval:2@1 step:1@0", 3),
    lightning("fsdp grad_op", "step:1@1 eval:2@1 step:1@0", 2),
    lightning("fsdp flat", "step:1@1 eval:2@1 step:1@0", 2),
    lightning("fsdp2", "step:1@1 eval:2@0", 2),
    lightning("fsdp2", "step:1@1 step:1@2 eval:2@1 step:1@0", 3),
    transformers("best", "step:2 epoch:1 eval:1 step:6 eval:3 epoch:1"),
    *(
        transformers(scene, "step:1...")
        for scene in (
            "accumulate", "one", "plain", "workers", "collator", "own methods", "model_init",
            "stream", "stream accumulated",
        )
    ),
    transformers("scaled", "forward:1..."),
    transformers("persistent", "step:2 step:4 step:2"),
    transformers("one", "epoch:1 eval:1 epoch:1"),
    transformers("jit", "step:3 step:6"),
    transformers("twice", "step:4 step:11", trainings=2),
    transformers("stream of datasets", STOPS),
    transformers("stream", "eval:1 epoch:1 eval:2"),
    transformers("fsdp2", "step:1@1 eval:1@0 step:3@1 eval:1@1", 2),
    transformers("fsdp2, accumulated", "step:1@2 step:4@0 eval:1@1", 3),
    Row("lightning_then_transformers.py", BOTH, "step:4 step:32 eval:2", trainings=2),
    *map(
        loaders,
        (
            "zip; accumulated", "now and then; accumulated, workers", "one in the other; seeded",
            "chain; accumulated", "epoch by epoch; accumulated, workers",
        ),
    ),
    loaders("epoch by epoch; seeded", ranks=2),
    Row("accelerate_loop.py out", ACCELERATE, "step:2@1 step:3@2", 3),
    Row("hf_causal_lm.py out", TRANSFORMERS, "step:2@1 step:3@2", 3),
    Row("trl_small.py out --method grpo --items 16 --accumulate 2 --generations 4", TRL,
        "step:1@1 step:2@1", ranks=2),
    # completions are used in four steps; a reference model that follows the model
    Row("trl_small.py out --method grpo --items 4 --moving-reference", TRL, "step:1..."),
    Row("trl_small.py out --method grpo --items 6 --accumulate 2 --generations 4 --workers 2", TRL,
        "step:1..."),
    Row("trl_small.py out --method dpo --items 16 --moving-reference", TRL, "step:1..."),
    *(
        Row(f"{script} out --workers {workers} --accumulate {accumulate}", loads,
            stops if ranks * accumulate < 8 else "step:1@1", ranks)
        for script, loads in (
            ("hf_causal_lm.py", TRANSFORMERS), ("accelerate_loop.py", ACCELERATE),
            ("trl_small.py", TRL),
        )
        for ranks, stops in ((1, "step:2 step:1"), (2, "step:1@1 step:2@0"))
        for workers, accumulate in ((0, 1), (2, 4))
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    "row",
    [*ALWAYS, *(pytest.param(row, marks=pytest.mark.long) for row in (*SOMETIMES, *STRUCTURES))],
    ids=str,
)
def test_the_same_bits(row: Row, tmp_path: Path) -> None:
    """Each step once, and nothing else that can be seen differs."""
    assert "has changed and cannot be saved" not in proved(row, tmp_path)

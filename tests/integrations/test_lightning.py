"""Lightning's packages and strategies by name, its cluster environment, and an epoch that other
numbers of ranks share."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import zygote
from integrations.proofs import LIGHTNING
from processes import captured

from hydroslurm.errors import UsageError
from hydroslurm.integrations import lightning_strategies
from hydroslurm.integrations.lightning_fit import require_known_lightning
from hydroslurm.integrations.lightning_strategies import strategy_class

RESIZED = Path(__file__).with_name("lightning_resized.py")
STOPPED, SAMPLES = 75, 67
SCRIPT = Path(__file__).with_name("lightning_packages.py")
OURS = "hydroslurm.compat.hfai"
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29511",
}  # fmt: skip


@pytest.mark.parametrize(
    "order",
    [
        pytest.param((OURS, "lightning.pytorch"), marks=pytest.mark.long),
        ("lightning.pytorch", OURS, "pytorch_lightning"),
        pytest.param(("lightning.pytorch", "pytorch_lightning", OURS), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_either_package_in_any_order(order: tuple[str, ...], tmp_path: Path) -> None:
    """Each of Lightning's packages, imported before ours or after it, beside the other or alone,
    trains as a single, bound process by the strategies' names, with HFAI's environment and callback
    and ours; an argument of Lightning 1 is answered with what to write."""
    done = captured([sys.executable, SCRIPT, *order], cwd=tmp_path, timeout=400)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert done.stderr.count("bound to NUMA node") == 2  # it trains by two names
    said = r"Trainer\(gpus=8\) is of .*accelerator=\"gpu\", devices=8"
    assert re.match(said, seen.pop("gpus"))
    assert seen == {"steps": [4, 4], "checkpoints": 1, "saved": True}


def test_the_environment_is_that_of_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks, nodes, address and port; a Trainer of another size is told the right one."""
    import lightning.pytorch  # noqa: F401 - brings the environment with it

    for name in [n for n in os.environ if n.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    environment = lightning_strategies.HydroslurmEnvironment()
    assert environment.creates_processes_externally
    assert (environment.main_address, environment.main_port) == ("10.0.0.1", 29511)
    assert (environment.world_size(), environment.global_rank()) == (4, 3)
    assert (environment.node_rank(), environment.local_rank()) == (1, 1)
    assert (environment.num_nodes, environment.devices) == (2, 2)
    environment.validate_settings(num_devices=2, num_nodes=2)
    with pytest.raises(UsageError, match="2 nodes with 2 ranks each"):
        environment.validate_settings(num_devices=2, num_nodes=3)
    # for a rank by spawn
    assert pickle.loads(pickle.dumps(environment)).global_rank() == 3
    for reduces in (False, True):
        made = strategy_class("lightning.pytorch", reduces=reduces)
        assert pickle.loads(pickle.dumps(made)) is made


@pytest.mark.filterwarnings("ignore:The `srun` command")
def test_a_lightning_that_is_not_known_and_a_strategy_that_cannot_be_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line that names what is missing; and the strategy by name, with what does work."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.loops import _TrainingEpochLoop
    from lightning.pytorch.strategies import ModelParallelStrategy

    options = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    for strategy in ("auto", "ddp", ModelParallelStrategy()):
        require_known_lightning(Trainer(**options, strategy=strategy))
    trainer = Trainer(**options)
    with monkeypatch.context() as patched:
        patched.delattr(_TrainingEpochLoop, "advance")
        said = r"trainer\.fit_loop\.epoch_loop\.advance; hydroslurm knows 2\.4 to 2\.6"
        with pytest.raises(UsageError, match=said):
            require_known_lightning(trainer)
    trainer.strategy.__class__ = type("DeepSpeedStrategy", (type(trainer.strategy),), {})
    with pytest.raises(UsageError, match=r'DeepSpeedStrategy shards .*="ddp" or "fsdp"'):
        require_known_lightning(trainer)


@pytest.mark.parametrize(
    "attempts", [["2:2", "1:7", "3:"], pytest.param(["1:2", "3:4", "2:"], marks=pytest.mark.long)]
)
def test_an_epoch_goes_on_with_another_number_of_ranks(attempts: list[str], tmp_path: Path) -> None:
    """The rest of an epoch is more batches for fewer ranks: Lightning trains all of them, validates
    behind them, and the next epoch is whole."""
    ran = zygote.ran([RESIZED, tmp_path, *attempts], loads=LIGHTNING)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    ranks = [int(one.partition(":")[0]) for one in attempts]
    assert found["exits"] == [[STOPPED] * n for n in ranks[:-1]] + [[0] * ranks[-1]], ran.stderr
    for epoch in (0, 1):
        notes = [(kind, what) for of, kind, what in found["notes"] if of == epoch]
        trained = Counter(place for kind, what in notes if kind == "trained" for place in what)
        once = dict.fromkeys(range(SAMPLES), 1)
        assert {place: n for place, n in trained.items() if place < SAMPLES} == once
        # by the ranks that ended the epoch: on a busy machine the stop may come behind its end
        assert sum(kind == "validated" for kind, _ in notes) in ranks[1:]

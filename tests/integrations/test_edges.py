"""Frameworks at the edges: unknown versions, other models, finished runs, runs that are trained
longer, and what is not trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
import zygote
from integrations.proofs import ACCELERATE, LIGHTNING, TRANSFORMERS

from hydroslurm.errors import UsageError
from hydroslurm.integrations.transformers import make_preemptible

EDGES = Path(__file__).with_name("edges.py")
ADAPTER = """
import torch
from transformers import Trainer, TrainingArguments
from hydroslurm.integrations.transformers import make_preemptible

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(2, 10000).requires_grad_(False)
        self.net = torch.nn.Linear(10000, 1)
    def forward(self, x, labels=None):
        return {"loss": (self.net(self.base(x)) - labels).square().mean()}

rows = [{"x": torch.ones(2), "labels": torch.zeros(1)} for _ in range(8)]
arguments = TrainingArguments(
    "out", max_steps=4, per_device_train_batch_size=2, report_to=[], save_strategy="no",
    use_cpu=True,
)
trainer = Trainer(model=Model(), args=arguments, train_dataset=rows)
make_preemptible(trainer, directory="run", every_steps=1).train()
"""
SAVES_OF_ITS_OWN = """
import torch
from hydroslurm.checkpoint.saver import Saver

def start(self, *given, own=Saver.start, **named):
    print("saves", named["step"])
    return own(self, *given, **named)

Saver.start = start
net = torch.nn.Linear(2, 1)
rows = [(torch.ones(2), torch.zeros(1))] * 9
"""
SAVING_SCRIPTS = {
    "lightning": """
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from hydroslurm.integrations.lightning import Preemptible

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net
    def training_step(self, batch, _):
        return (self.net(batch[0]) - batch[1]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

lightning.Trainer(
    max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
    callbacks=[ModelCheckpoint("out", every_n_train_steps=4), Preemptible(directory="run")],
).fit(Module(), torch.utils.data.DataLoader(rows))
""",
    "transformers": """
from transformers import Trainer, TrainingArguments
from hydroslurm.integrations.transformers import make_preemptible

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, x, labels=None):
        return {"loss": (self.net(x) - labels).square().mean()}

arguments = TrainingArguments(
    "out", max_steps=9, per_device_train_batch_size=1, report_to=[], save_steps=4, use_cpu=True
)
rows = [{"x": x, "labels": y} for x, y in rows]
make_preemptible(Trainer(Model(), arguments, train_dataset=rows), directory="run").train()
""",
    "accelerate": """
from accelerate import Accelerator
from hydroslurm.integrations.accelerate import epochs, prepare

accelerator = Accelerator(cpu=True)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
loader = torch.utils.data.DataLoader(rows)
net, optimizer, loader = prepare(accelerator, net, optimizer, loader, directory="run")
for _ in epochs(accelerator, 1):
    for step, (x, y) in enumerate(loader, 1):
        accelerator.backward((net(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0:
            accelerator.save_state("out")
""",
}
Found: TypeAlias = dict[str, tuple[list[int], list[str]]]


def played(framework: str, folder: Path) -> Found:
    """Name -> exit statuses and notes of all attempts."""
    loads = LIGHTNING if framework == "lightning" else TRANSFORMERS
    ran = zygote.ran([EDGES, framework, folder], loads=loads)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture(
    scope="module", params=[pytest.param("lightning", marks=pytest.mark.long), "transformers"]
)
def edges(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Found]:
    return request.param, played(request.param, tmp_path_factory.mktemp("edges"))


def test_another_model(edges: tuple[str, Found]) -> None:
    """A checkpoint of another model is refused with the step."""
    exits, notes = edges[1]["another model"]
    assert exits == [75, 0]
    assert "refused: step 3 of this run does not fit the model (" in notes[-1]
    assert "size mismatch" in notes[-1]


def test_a_run_that_had_come_to_its_end_is_trained_longer(edges: tuple[str, Found]) -> None:
    """It is the run that was to be as long from the beginning. With Lightning's max_steps in the
    middle of an epoch, where it validates, the rest of that epoch comes first."""
    framework, found = edges
    for by in (name for name in found if f"{name}, whole" in found):
        (exits, longer), (_, whole) = found[by], found[f"{by}, whole"]
        assert exits == [75, 0]
        if (framework, by) == ("lightning", "max_steps"):
            longer, whole = (
                [one.split()[:3] for one in notes if one.startswith("step")]
                for notes in (longer, whole)
            )
        steps = [one for one in longer if not str(one).startswith(("weights", "end", "log"))]
        assert len(steps) > 4
        assert steps == [one for one in whole if one in steps]
        assert longer[-1] == whole[-1]


def test_a_finished_run_and_one_that_transformers_has_saved(edges: tuple[str, Found]) -> None:
    """A restart of the one exits with 0 and trains nothing; the other goes on within its second
    epoch, whose order is another one, with the same steps as without us."""
    _, found = edges
    assert found["finished"][0] == found["finished again"][0] == [0]
    assert found["finished again"][1] == found["finished"][1]
    assert found.get("own checkpoint, bare") == found.get("own checkpoint")


def test_a_transformers_that_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that names what is missing, and nothing half installed; Lightning's is in
    test_lightning.py."""
    import transformers

    trainer = transformers.Trainer(
        model=torch.nn.Linear(1, 1), args=transformers.TrainingArguments(str(tmp_path))
    )
    before = dict(vars(trainer))
    monkeypatch.delattr(transformers.trainer, "skip_first_batches")
    said = r"transformers\.trainer\.skip_first_batches; hydroslurm knows 4\.57 to 5"
    with pytest.raises(UsageError, match=said):
        make_preemptible(trainer)
    assert dict(vars(trainer)) == before


def test_what_is_not_trained_is_apart(tmp_path: Path) -> None:
    """In files that later checkpoints share."""
    (tmp_path / "adapter.py").write_text(ADAPTER)
    ran = zygote.ran([tmp_path / "adapter.py"], loads=TRANSFORMERS)
    assert ran.returncode == 0, ran.stderr
    files = list(tmp_path.glob("run/checkpoints/*/frozen-00000.safetensors"))
    assert len(files) == 2
    assert all(80_000 < file.stat().st_size < 82_000 for file in files)


@pytest.mark.parametrize(
    ("framework", "every_s"), [*((one, "600") for one in SAVING_SCRIPTS), ("transformers", "0")]
)
def test_the_run_saves_with_its_script(
    framework: str, every_s: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each checkpoint of the script's own, here behind steps 4 and 8, at the next safe point:
    a crash loses no more steps than it would without hydroslurm. Not where nothing is to be saved
    while it trains."""
    monkeypatch.setenv("HYDROSLURM_SAVE_EVERY_S", every_s)
    script = tmp_path / "train.py"
    script.write_text(SAVES_OF_ITS_OWN + SAVING_SCRIPTS[framework])
    loads = {"lightning": LIGHTNING, "transformers": TRANSFORMERS, "accelerate": ACCELERATE}
    ran = zygote.ran([script], loads=loads[framework])
    assert ran.returncode == 0, ran.stderr
    saved = [int(line.split()[1]) for line in ran.stdout.splitlines() if line.startswith("saves")]
    behind = {"lightning": [4, 8], "transformers": [5, 9], "accelerate": [4, 8]}
    assert saved == (behind[framework] if every_s == "600" else [])

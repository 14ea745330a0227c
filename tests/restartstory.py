"""Elastic runs whose members are agents that start their workers anew: real agents, a real
coordinator, real signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from elasticstory import BEGIN, ElasticStory
from processes import text_of, wait_until

SCRIPTS = Path(__file__).parent / "integration" / "scripts"
NOTES = SCRIPTS / "elastic_notes.py"
"""By which all these scripts say what they do; lies beside each."""
STOCK = {"lightning": "elastic_lightning.py", "transformers": "elastic_transformers.py"}
"""Scripts of a linear regression by SGD, for ``lr``, ``samples``, ``batch``, ``epochs``."""

AGENT = """
    import json, sys
    from hydroslurm.cli import main
    options = json.loads(sys.argv[1])
    sys.argv = ["hydroslurm", "agent", "--", *options["agent"], options["script"], sys.argv[1]]
    main()
"""

LIGHT = """
import os, signal, sys, time
from pathlib import Path
from elastic_notes import options, say

# any script, without the seconds that torch takes: it leaves at SIGTERM as one that has saved does
names = ("RANK", "WORLD_SIZE", "HYDROSLURM_GENERATION", "HYDROSLURM_INCARNATION",
         "HYDROSLURM_STEP_KEY", "MASTER_ADDR", "MASTER_PORT", "HYDROSLURM_RUN_DIR")
seen = {name.lower().removeprefix("hydroslurm_"): os.environ[name] for name in names}

stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
say("began", elastic=os.environ.get("HYDROSLURM_ELASTIC"), **seen)
while not stopped:
    if Path(options["folder"], "finish").exists():
        say("finished", **seen)
        sys.exit(0)
    time.sleep(0.01)
say("stopped", **seen)
sys.exit(75)
"""

TRAIN = (
    textwrap.dedent(BEGIN)
    + """
import threading
from datetime import timedelta
from elastic_notes import say, say_step

hang = options.get("hang") if os.environ["HYDROSLURM_GENERATION"] == "1" else None
if hang == "before":
    say("hangs", epoch_s=time.time())
    time.sleep(600)
dist.init_process_group("gloo", timeout=timedelta(seconds=options.get("timeout_s", 1800)))
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))
if options.get("sharded"):
    from torch.distributed.fsdp import fully_shard
    model = fully_shard(net, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
else:
    model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=options["batch"], sampler=ResumableSampler(data))

with hydroslurm.Run(
    model=model, optimizer=optimizer, loader=loader, elastic=True,
    every_steps=options.get("every", 0), every_s=0,
) as run:
    for x, y, ids in run.batches(epochs=options["epochs"]):
        step = run.step
        if hang in ("sleep", "spin") and step >= 5:
            say("hangs", epoch_s=time.time())
            while True:
                time.sleep(60 if hang == "sleep" else 0)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say_step(step=step, epoch=run.epoch, ids=ids.tolist())
        time.sleep(options.get("step_s", 0.02))
whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.parameters()]
say("done", step=run.step, weights=sum(one.detach().double().sum().item() for one in whole))
if hang == "end":
    say("hangs", epoch_s=time.time())
    threading.Thread(target=time.sleep, args=(600,)).start()
"""
)


class RestartStory(ElasticStory):
    """One elastic run of agents, in a folder."""

    def __init__(self, folder: Path, *, script: str = LIGHT, **size: float) -> None:
        super().__init__(folder, program=AGENT, **{"engine": "restart", **size})  # type: ignore[arg-type]
        self._script = folder / "train.py"
        self._script.write_text(script)
        shutil.copy(NOTES, folder)

    def start(  # type: ignore[override]
        self, name: str, *agent: str, heartbeat_s: float = 10.0, **options: Any
    ) -> Any:
        """Start an agent; ``agent``: torchrun's options."""
        return super().start(
            name,
            environ={
                "HYDROSLURM_ALONE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "HYDROSLURM_HEARTBEAT_S": str(heartbeat_s),
                "HYDROSLURM_RUN_DIR": str(self.folder.root / "members" / name),
            },
            folder=str(self.root),
            script=str(self._script),
            member=name,
            agent=agent,
            **options,
        )

    def said(self, kind: str, **wanted: Any) -> list[dict[str, Any]]:
        """What the workers have said."""
        return said(self.root, kind, **wanted)

    def wait_for_workers(self, generation: int, *names: str) -> list[dict[str, Any]]:
        """Until those of all these members have begun in a generation."""
        number = str(generation)
        wait_until(
            lambda: len(self.said("began", generation=number)) >= len(names),
            lambda: f"workers of generation {generation}\n{self}",
        )
        found = self.said("began", generation=number)
        assert sorted(one["member"] for one in found) == sorted(names), str(self)
        self.wait_for("generation", generation)
        return found

    def status(self) -> dict[str, Any]:
        """What the coordinator has written last."""
        return self.folder.read(self.folder.status_json) or {}

    def steps(self, name: str) -> list[dict[str, Any]]:
        return self.said("step", member=name)

    def kill_worker(self, name: str) -> None:
        os.kill([*self.said("began", member=name), *self.steps(name)][-1]["pid"], signal.SIGKILL)

    def close(self) -> None:
        super().close()
        for one in [*self.said("began"), *self.said("step")]:
            try:
                os.kill(one["pid"], signal.SIGKILL)
            except ProcessLookupError:
                continue


def said(folder: Path, kind: str, **wanted: Any) -> list[dict[str, Any]]:
    """What workers have said into a folder."""
    lines = text_of(folder / "said").splitlines(keepends=True)
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [
        one
        for one in found
        if one["kind"] == kind and all(one[name] == value for name, value in wanted.items())
    ]


def check_stock_training(folder: Path, *, lr: float, epochs: int) -> None:
    """Each sample of each epoch came once, and the weights are those of SGD over the steps that
    were said: of each the mean gradient of all ranks, whatever their number was."""
    first, steps = said(folder, "began")[0], said(folder, "step")
    xs = torch.tensor(first["xs"], dtype=torch.float64)
    for epoch in range(epochs):
        seen = Counter(n for one in steps if one["epoch"] == epoch for n in one["ids"])
        assert seen == dict.fromkeys(range(len(xs)), 1), epoch
    net = torch.nn.Linear(8, 1, dtype=torch.float64)
    for one, values in zip(net.parameters(), first["weights"], strict=True):
        one.data.copy_(torch.tensor(values).view_as(one))
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    last = max(one["step"] for one in steps)
    for number in range(last + 1):
        of_ranks = [one["ids"] for one in steps if one["step"] == number]
        losses = [
            torch.nn.functional.mse_loss(net(x), x.sum(1, keepdim=True))
            for x in map(xs.__getitem__, of_ranks)
        ]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    expected = [one.flatten().tolist() for one in net.parameters()]
    ended = said(folder, "done")
    assert ended
    for one in ended:
        assert one["step"] == last + 1
        for mine, wanted in zip(one["weights"], expected, strict=True):
            torch.testing.assert_close(
                torch.tensor(mine), torch.tensor(wanted), rtol=1e-4, atol=1e-5
            )

"""What averaging the members' weights now and then costs in accuracy, and saves in bytes: four
members on handwritten digits, a real elastic run on this machine.

`test_accuracy_*`: on a fifth of the images that no member has trained on, the mean over seeds, with
gradients summed in each step (`ddp`) and with weights averaged every 8 and every 32 steps.
`train_loss_*`: on the others. `received_ratio_*`: the bytes that arrive at the first rank, from the
other ranks, by the kernel's count, to those with summed gradients.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from harness import finish, options, scratch

from elasticstory import ElasticStory  # isort: skip - harness puts tests/ on the path

MEMBERS = 4
PROGRAM = """
    import json, os, socket, struct, sys
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    import hydroslurm
    from hydroslurm.data import ResumableSampler

    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(options["seed"])
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(options["seed"]))
    images, labels = torch.from_numpy(images).float()[order] / 16, torch.from_numpy(labels)[order]
    data = TensorDataset(images[360:], labels[360:])
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(data, batch_size=8, sampler=ResumableSampler(data, seed=options["seed"]))

    def received():
        total = 0
        for descriptor, _ in run._engine.group._sockets:
            with socket.socket(fileno=os.dup(descriptor)) as one:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                total += struct.unpack_from("Q", info, 128)[0]
        return total

    with hydroslurm.Run(
        model=model, optimizer=optimizer, loader=loader, every_s=0, elastic=True
    ) as run:
        begun = None
        for x, y in run.batches(epochs=options["epochs"]):
            begun = received() if begun is None else begun
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        arrived, rank = received() - begun, dist.get_rank()
        with torch.no_grad():
            right = (net(images[:360]).argmax(1) == labels[:360]).float().mean().item()
            left = nn.functional.cross_entropy(net(images[360:]), labels[360:]).item()
    print("DONE", json.dumps({
        "rank": rank, "accuracy": right, "loss": left, "received": arrived, "steps": run.step,
        "parameters": sum(one.numel() for one in net.parameters()),
    }))
"""


def main() -> None:
    chosen = options(__doc__ or "")
    seeds, epochs = (1, 2) if chosen.quick else (3, 10)
    result: dict[str, Any] = {"members": MEMBERS, "seeds": seeds, "epochs": epochs}
    received: dict[int, float] = {}
    for every in (0, 8, 32):
        ends = [trained(chosen, every, seed=seed, epochs=epochs) for seed in range(seeds)]
        name = f"every_{every}" if every else "ddp"
        result[f"test_accuracy_{name}"] = statistics.mean(one["accuracy"] for one in ends)
        result[f"train_loss_{name}"] = statistics.mean(one["loss"] for one in ends)
        received[every] = statistics.mean(one["received"] for one in ends)
        if every:
            result[f"received_ratio_{name}"] = received[every] / received[0]
        else:
            result["received_mb_ddp"] = 1e-6 * received[every]
            result |= {"steps": ends[0]["steps"], "parameters": ends[0]["parameters"]}
    finish(chosen, "Weights averaged now and then, against gradients summed in each step:", result)


def trained(chosen: Any, every: int, *, seed: int, epochs: int) -> dict[str, Any]:
    """What the first rank says at the end of one run."""
    with scratch("averaging", chosen) as folder:
        story = ElasticStory(folder, program=PROGRAM, max=MEMBERS, averaging_every=every)
        try:
            for name in "abcd":
                story.start(name, seed=seed, epochs=epochs)
            ends = [story.done(name) for name in "abcd"]
        finally:
            story.close()
    (first,) = (one for one in ends if one["rank"] == 0)
    return dict(json.loads(json.dumps(first)))


if __name__ == "__main__":
    main()

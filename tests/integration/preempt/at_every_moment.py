"""A rank that stands still at each moment of its attempt until it is let on: what
test_every_moment.py signals. ``at_every_moment.py FOLDER``

At a moment NAME it makes FOLDER/NAME, and goes on when there is FOLDER/NAME-go; the first moments
are made by the test, for they come before this.
"""

import atexit
import os
import sys
import threading
import time

import torch

import hydroslurm

FOLDER = sys.argv[1]


# what it needs is bound here: the last moment comes when modules are being cleared
def stand(name, work=lambda: None, path=FOLDER, exists=os.path.exists, open=open, sleep=time.sleep):
    open(f"{path}/{name}", "w").close()
    while not exists(f"{path}/{name}-go"):
        work()
        sleep(0.01)


model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train():
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    optimizer.step()


class Last:
    def __del__(self, stand=stand):
        stand("finalizing")


last = Last()
last.itself = last  # the collector finds it, when the modules are gone
atexit.register(stand, "leaving")
stand("between", train)
with hydroslurm.Run(model=model, optimizer=optimizer) as run:
    run.resume()
    train()
    run.step += 1
    run.safe_point()
    run.save()
stand("evaluating", train)
threading.Thread(target=stand, args=("joining",)).start()

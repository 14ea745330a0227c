"""HydroJobSche's way, as its README asks for: the model is wrapped, SIGUSR1 pauses and SIGUSR2 goes
on. It saves nothing at a preemption, so that the script's own epochs count."""

from __future__ import annotations

from digits_training import arguments, train_by_hand
from incumbent import Incumbent

if __name__ == "__main__":
    train_by_hand(arguments(), inside=Incumbent)

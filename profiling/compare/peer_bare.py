"""Bare: a script that knows nothing of preemption. `scontrol suspend` freezes it where it is, and a
requeue goes on with the last epoch that it saved."""

from __future__ import annotations

from digits_training import arguments, train_by_hand

if __name__ == "__main__":
    train_by_hand(arguments())

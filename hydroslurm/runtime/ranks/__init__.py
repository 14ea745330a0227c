"""The ranks of one job step: how they stop at one place, park with nothing in flight, and agree.

hub         a small process beside rank 0 that all ranks are connected to
book        what the hub knows and answers; agreements and pausing are parts of it; pure
frames      values on a socket
host        starting the hub, and finding it
link        a rank's connection
questions   the agreements that a rank waits for
meeting     one place in the training for all ranks to stop or save at
parking     one collective for all ranks to be held before
team        Ranks: all of it, as the rest of hydroslurm sees it
"""

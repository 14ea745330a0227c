"""The ranks of one job step: how they stop at one place, park with nothing in flight, and agree.

hub         a small process beside rank 0 that all ranks are connected to
book        what the hub knows and answers; agreements and pausing are parts of it; pure
hubline     one connection as the hub has it, and who lets it in
host        starting the hub
search      finding it, and joining
secret      what the ranks of one attempt know and nobody else does
greeting    how a rank and the hub prove it to each other
frames      messages on a connection, each with a MAC
messages    what a message may be
sockets     where they listen, and how many there may be
link        a rank's connection
questions   the agreements that a rank waits for
meeting     one place in the training for all ranks to stop or save at
parking     one collective for all ranks to be held before
team        Ranks: all of it, as the rest of hydroslurm sees it
"""

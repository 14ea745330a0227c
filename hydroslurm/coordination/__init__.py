"""Several ranks of one job step: stop at one safe point, park with no collective in flight, agree.
Knows nothing of training or checkpoints.

world           which rank of how many this process is
secret          the key that the ranks of one attempt share
authentication  how a rank and the coordinator prove that they know it, and seal what they send
rendezvous      starting the coordinator; torch's own rendezvous
server          accepts, authenticates, reads and writes; peers are its connections
coordinator     a small process beside rank 0 that every rank is connected to
state           what it knows and answers, and pause_state, a part of it (pure)
channel         a rank's connection to it
messages        which there are, and their forms
network         how the first node is reached; sockets
client          CoordinatorClient: all of it, as the rest of hydroslurm sees it
agreements      the agreements that a rank waits for
stop_barrier    one safe point for all ranks to stop or save at
pause_barrier   one collective for all ranks to be held before
collectives     how many collectives this rank has issued
"""

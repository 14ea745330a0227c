"""A parked rank's device memory: moved to the host, and given back bit for bit.

backend         what moves it: the protocol, and the states a device can be in
round           one vacate of all ranks: lock all, checkpoint all; restore all, unlock all
cuda_checkpoint backend: CUDA's own checkpoint API, called by a helper process
helper          that process, the only one that imports CUDA's bindings
arena_backend   backend: our own allocator, whose addresses stay while the memory is away
arena           the binding of that allocator, native/arena.h
communicators   NCCL's, which have to be suspended meanwhile
request         how ``hydroslurm pause --vacate`` asks for one
policy          when a pause vacates, and whether there is time and memory for it
"""

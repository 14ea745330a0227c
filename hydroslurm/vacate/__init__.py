"""A parked rank's device memory: moved to the host, and given back bit for bit.

round           one vacate of all ranks: lock all, checkpoint all; restore all, unlock all
cuda_checkpoint what moves it: CUDA's own checkpoint API, called by a helper process
helper          that process, the only one that imports CUDA's bindings
communicators   NCCL's, which have to be suspended meanwhile
request         how ``hydroslurm pause --vacate`` asks for one
policy          when a pause vacates, and whether there is time and memory for it
"""

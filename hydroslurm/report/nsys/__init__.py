"""Reports of NVIDIA's nsys: hydroslurm's NVTX marks and what the GPU did around them."""

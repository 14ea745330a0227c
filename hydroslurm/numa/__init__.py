"""Keep a rank on the cores and the memory next to its device: :func:`bind`.

Reads the kernel's own description of the machine (``/sys``), asks for two things (affinity, memory
policy), and knows nothing of PyTorch, of training, or of other ranks than those that the
environment names.
"""

from hydroslurm.numa.binding import Binding, bind

__all__ = ["Binding", "bind"]

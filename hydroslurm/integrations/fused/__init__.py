"""Modules and optimizers in the forms that PyTorch has fused, where they are equal and faster.

``rewriters`` says what may take the place of what; ``norms``, ``activations`` and ``attention`` are
those that come with hydroslurm. ``trial`` compares and times a module, ``whole`` the model;
``swap`` puts in place, ``choices`` is what came out. ``modules`` and ``optimizers`` are the calls.
"""

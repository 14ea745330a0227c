"""Modules and optimizers in the forms that PyTorch has fused, where they are equal and faster.

``rewriters`` propose what may take the place of what; users add to them. ``trial`` compares and
times, ``swap`` puts in place, ``choices`` is what came out. ``modules`` and ``optimizers`` are the
calls.
"""

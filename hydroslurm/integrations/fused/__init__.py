"""Modules and optimizers in the forms that PyTorch has fused, where they are equal and faster.

``rewriters`` and ``attention`` propose what may take the place of what; users add to the first.
``trial`` compares and times, ``swap`` puts in place, ``choices`` is what came out. ``modules`` and
``optimizers`` are the calls.
"""

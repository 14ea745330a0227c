"""Modules and optimizers in the forms that PyTorch has fused, where they are equal and faster.

``rewriters`` propose what may take the place of what; users add to them. ``trial`` compares and
times; ``modules`` has the calls, and keeps what was chosen for the next attempt.
"""

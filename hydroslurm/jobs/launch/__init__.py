"""Submitting: batch scripts, submitit's executor with a run folder per job, and what runs in a rank
before the user's code."""

"""After a run: event logs, Slurm's accounting and nsys profiles become figures and pictures.

The only room that reads event logs as a whole. ``lines`` -> ``attempts`` (with ``pauses`` and
``progress``) -> ``reading`` -> ``history`` -> ``stops``, ``rows``, ``goodput`` ->
``figures``, ``run_tables`` -> ``views``, ``timeline``, ``histograms``, ``trace`` -> ``writing``.
It knows nothing of training, checkpoints or running ranks, and never touches a live job.
"""

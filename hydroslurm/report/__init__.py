"""Reports after a run: figures and pictures from event logs, Slurm's accounting and nsys profiles.

Only this room reads event logs as a whole. ``lines`` -> ``attempts`` (with ``pauses`` and
``progress``) -> ``reading`` -> ``history`` -> ``stops``, ``external_sources``, ``goodput`` ->
``figures`` -> ``views``, ``timeline``, ``histograms``, ``trace`` -> ``writing``. Each figure is
declared once, with its field (``tables.figure``). The room knows nothing of training, checkpoints
or running ranks, and never touches a live job.
"""

"""After a run: event logs, Slurm's accounting and nsys profiles become figures and pictures.

The only room that reads event logs as a whole. ``lines`` -> ``attempts`` (with ``pauses`` and
``progress``) -> ``reading`` -> ``history`` -> ``stops``, ``external_sources``, ``goodput`` ->
``figures`` -> ``views``, ``timeline``, ``histograms``, ``trace`` -> ``writing``. A figure is
declared with its field (``tables.figure``), and nowhere else. The room knows nothing of training,
checkpoints or running ranks, and never touches a live job.
"""

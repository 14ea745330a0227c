"""``python -m hydroslurm.cli``."""

from hydroslurm.cli import main

main()

import sys

from hydroslurm.jobs.supervisor.main import main

sys.exit(main(sys.argv[1:]))

import sys

from hydroslurm.supervisor.main import main

sys.exit(main(sys.argv[1:]))

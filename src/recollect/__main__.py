"""`python -m recollect`: the command line, and nothing else."""

import sys

from recollect._run import main

if __name__ == "__main__":
    main(sys.argv[1:])

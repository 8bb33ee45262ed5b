"""`python -m controller`: membership of workers, morphs of instances, and deployments."""

import sys

from bus.service import run
from controller.service import main

if __name__ == "__main__":
    sys.exit(run("controller", main))

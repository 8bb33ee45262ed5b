"""`python -m controller`: watches the workers' leases and says who joined, left and died."""

import sys

from bus.service import run
from controller.service import main

if __name__ == "__main__":
    sys.exit(run("controller", main))

"""`python -m controller`: says who joined, left and died, and morphs the models of those that live."""

import sys

from bus.service import run
from controller.service import main

if __name__ == "__main__":
    sys.exit(run("controller", main))

"""`python -m gateway`: HTTP in, tokens out."""

import sys

from bus.service import run
from gateway.service import main

if __name__ == "__main__":
    sys.exit(run("gateway", main))

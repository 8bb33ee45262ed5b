"""`python -m monitor`: telemetry in, smoothed metrics out."""

import sys

from bus.service import run
from monitor.service import main

if __name__ == "__main__":
    sys.exit(run("monitor", main))

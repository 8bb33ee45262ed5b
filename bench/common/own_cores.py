"""Import before torch: this process has the cores to itself, as with `worker.spin = true`.

Waiting threads then stay awake from one product to the next, for the engine and for what it is compared with.
"""

import os

from worker.__main__ import SPIN_COUNT

os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

"""Tests. This runs before any of them imports torch, as `kernels` does in the service (see there)."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

"""The tests. This module runs before any of them imports torch or reads a setting."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as `kernels` does in the service

# The caller's own settings (INSTAR_PORT, INSTAR_MODEL, ...) must not reach a test or its service.
# INSTAR_SCREENSHOTS is no setting: it asks the browser tests to write the documentation's pictures.
for _name in [name for name in os.environ if name.startswith("INSTAR_") and name != "INSTAR_SCREENSHOTS"]:
    del os.environ[_name]

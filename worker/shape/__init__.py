"""The weights a device holds: layer variants, their host copies, and the copies between them."""

"""Pipeline parallelism: one instance whose layers are on several workers, led by one of the first stage."""

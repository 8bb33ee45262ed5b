"""Programs that others wrote, unmodified, against the real service (make test-clients)."""

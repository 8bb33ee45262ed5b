"""The step loop: schedule, execute, update, publish. Knows nothing of Redis; one thread owns it."""

"""The step loop: schedule, run, sample, publish. Knows nothing of Redis; one thread owns it."""

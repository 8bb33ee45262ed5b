"""The worker as a process: the engine in its thread, the bus in the event loop (`worker` connects them)."""

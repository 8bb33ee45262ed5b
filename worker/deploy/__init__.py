"""Models that are loaded and unloaded while others serve, and the KV pages that they share."""

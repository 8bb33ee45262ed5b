"""For those who run it: administration, probes, metrics, events."""

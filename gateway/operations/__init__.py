"""Endpoints for operators: administration, probes, metrics, events."""

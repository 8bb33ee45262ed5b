"""Profiles of a model's cost and speed, from one and two of its layers (iServe §5)."""

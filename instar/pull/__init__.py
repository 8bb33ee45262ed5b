"""Checkpoints from a hub: which files are fetched, and how."""

"""Registered models and their deployments, brought about on the workers that there are."""

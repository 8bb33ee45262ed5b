"""Recorded traffic, replayed against a server."""

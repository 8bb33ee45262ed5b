"""Requests that schemathesis makes from /openapi.json, to the real service."""

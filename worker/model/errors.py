"""Why a model folder cannot be served."""

from __future__ import annotations


class ModelError(Exception):
    """Says which folder, file, tensor or number is wrong, what was expected, and what to do."""

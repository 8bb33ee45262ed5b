"""Morphs: changes of the shape that serves, between two steps of the engine, while requests decode."""

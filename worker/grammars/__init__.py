"""Grammars of structured output, by the library llguidance: compiled beside the engine's thread, and masks.

The engine knows them by the interfaces of `worker.engine.grammars`.
"""

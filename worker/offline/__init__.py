"""The offline tools: `instar quantize` and `instar profile`."""

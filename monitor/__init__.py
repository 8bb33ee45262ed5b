"""Telemetry in, smoothed metrics out. Serving goes on without it, by the gateways' own counts."""

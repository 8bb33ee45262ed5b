"""Telemetry in, smoothed metrics out. May die at any time: serving goes on, on the gateways' own counts."""

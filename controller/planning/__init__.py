"""Deciding how and where a model is deployed (iServe §4-§6). Pure: no clock, no input or output.

A profile of fingerprints becomes the configuration map (`latency` from `surfaces` and `links`, `memory`,
`estimates`), an intent ranks it (`intents`), layers are fitted onto devices (`fitting`) that a placement
policy orders (`placement`); `planning` is all of it in one call, and `room` says what would make room where
nothing fits.
"""

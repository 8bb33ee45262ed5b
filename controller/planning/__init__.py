"""How and where a model is deployed (iServe §4-§6). Pure: no clock, no input or output.

A profile of fingerprints becomes the configuration map (`latency` from `surfaces`, `memory`, `estimates`), an
intent ranks it (`intent`), layers are fitted onto devices (`fitting`) that a placement policy orders
(`placement`). `plan` is all of it in one call. Where nothing fits, `making_room` says what would make room.
"""

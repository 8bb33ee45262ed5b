"""Profiles of a model's cost and speed, from one and two of its layers (iServe §5).

`fingerprint` loads the first two layers, with embedding and head, in every precision. `profiler` sends them
dummy requests, one engine step at a time, between the steps of other models: to whole layers and to one
rank's share of them. `runner` runs profiles in the engine's thread. `links` measures the communication of
ranks and stages with another worker. `measurer` carries out Measure commands and keeps profiles beside
their models, so that nothing is measured twice.
"""

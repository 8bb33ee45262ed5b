"""What a model costs and how fast it is, told by one and two of its layers (iServe §5).

`cut` loads the first two layers, with embedding and head, in every precision; `profiler` sends them dummy
requests, one engine step at a time, between the steps of what serves, to all of a layer and to one rank's
share of it; `measuring` carries that out in the engine's thread. `links` measures with another worker what
ranks and stages say to each other. `stored` keeps the result beside the model, so that nothing is measured
twice.
"""

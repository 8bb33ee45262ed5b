"""What a model costs and how fast it is, told by one and two of its layers (iServe §5).

`cut` loads the first two layers, with embedding and head, in every precision; `profiler` sends them dummy
requests, one engine step at a time, between the steps of what serves; `measuring` carries that out in the
engine's thread; `stored` keeps the result beside the model, so that nothing is measured twice.
"""

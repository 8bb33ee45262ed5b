"""Offline: in which order a model's layers should be swapped (MorphServe, section 4.2 and appendix A).

`python -m worker.profile MODEL` (or `instar profile MODEL`). `scores` are the measures of one layer, `greedy`
is Algorithm 1 over them, `order` what the worker reads of the result, MODEL/instar/profile-{precision}.json.
"""

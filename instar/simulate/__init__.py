"""A simulation of a cluster under recorded traffic: the scheduler, dispatcher and morphs that serve."""

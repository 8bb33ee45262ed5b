"""Registered models and their deployments: what is wished for, brought about on the workers that there are.

`reconcile` is a plain function from records and an observation to transitions; `deployer` applies them.
"""

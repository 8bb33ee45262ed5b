"""Registered models and their deployments: what is wished for, brought about on the workers that there are.

`reconcile` is a plain function from what is wished for and what is seen to decisions; `service` acts on them.
"""

"""The morphs of running instances: views of them, the policy, and the loops that apply it."""

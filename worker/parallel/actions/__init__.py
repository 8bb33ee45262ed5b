"""What all members of a group do after the same step, each function at one of them, by what it changes.

`TensorParallelExecutor` carries them out in the order in which they come.
"""

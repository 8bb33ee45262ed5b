"""What all members of a group do after the same step, each function at one of them, by what it changes.

`worker.distributed.messages` says what each is told; `Party` carries them out in the order they come.
"""

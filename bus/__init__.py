"""Redis Streams between the processes of Instar: the only thing the services share.

This module imports nothing, so that `bus.messages` stays usable where neither Redis nor msgspec is.
"""

"""Redis Streams between the processes of Instar: the only code that services share.

`bus.client.connect` returns the `Bus` that a service uses; `bus.service.run` is the frame of its process.
"""

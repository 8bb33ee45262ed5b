"""Pipeline parallelism: one instance whose layers are on several workers, of one host or of several.

The first stage's worker leads: it alone has requests, scheduler and sampler, embedding and head. The others
hold layers and their KV under the leader's block numbers, and run what comes to them as it comes.

==============  ==============================================================================
`instance`      the leader's instance: several batches on their way at a time
`pipeline`      the leader's end of the connections
`follower`      what else takes part: layers or a share of them, their KV, and what comes for them
`ranks`         the ranks of one stage, and what they add up by
`stages`        the door of a worker, and what it runs for leaders elsewhere
`hop`           one connection: messages and tensors in order
`probe`         answers a worker that measures what such connections and sums take
`wire`          the messages
==============  ==============================================================================
"""

"""Pipeline parallelism: one instance whose layers are on several workers, of one host or of several.

The first stage's worker leads: it alone has requests, scheduler and sampler, embedding and head. The others
hold layers and their KV under the leader's block numbers, and run what comes to them as it comes.

==============  ==============================================================================
`instance`      the leader's instance: several batches on their way at a time
`pipeline`      the leader's end of the connections
`stage_runner`  one such stage: its layers or a share of them, their KV, its messages
`ranks`         the ranks of one stage, and what they add up by
`stage_host`    the stages that this worker runs for leaders elsewhere
==============  ==============================================================================
"""

"""The worker as a process: the engine in its thread, the bus in the event loop.

::

    requests:{instance} -> intake -+                               +-> outbox -> tokens:{gateway}
    control:{worker}  -> commands -+-> ledger -> engine thread ----+-> telemetry
    lease:{worker}  <-> membership (a lost lease fences all of it)

====================  ============================================================================
`ledger`              which request of which attempt runs here; pure
`engine_thread`       runs `worker.engine.Engine`, fed through a queue, one step after the other
`outbox`              what the engine made, published in order, kept while Redis is away
`membership`          epoch, lease, card; tells when the lease was lost
`intake`              readers of the instances' streams and of the control stream
`gateways`            cancels what dead gateways asked for
`telemetry`           reports numbers
`morph_reports`       says what became of morphs
`loading`             page pool, models, KV caches, the first forward pass
`load_morphs`         variants of the layers, their order, the executor of morphs
`load_task`           the same in a thread, with progress on the card
`cards`               what is shown of an instance
`residents`           the instances' streams and cards, of models that come and go, too
`site_hooks`          how they hear of those from the engine's thread
`regroup`             whether it may join groups: with its only model
`worker`              puts them together; drain and exit
====================  ============================================================================
"""

"""The worker as a process: the engine in its thread, the bus in the event loop.

::

    requests:{instance} -> intake -+                               +-> publisher -> tokens:{gateway}
    control:{worker}  -> commands -+-> ledger -> engine thread ----+-> telemetry
    lease:{worker}  <-> membership (a lost lease fences everything)

====================  ============================================================================
`worker`              puts the parts together; drain and exit
`loading`             loading in a thread, with progress on the card; brings no torch
`start_up`            page pool, device, models of the settings, transport
`engine_thread`       runs `worker.engine.engine.Engine`, fed through a queue, one step after the other
`intake`              readers of the instances' streams and of the control stream; dead gateways
`ledger`              which request of which attempt runs here; pure
`publisher`           outputs of steps and reports of morphs, in order, kept while Redis is away
`telemetry`           the engine's numbers, and a watchdog over its steps
`membership`          epoch, lease, card; tells when the lease was lost
`instances`           the instances' streams and cards, of models that come and go, too
`groups`              whether the worker may join groups, and with which workers
`measures`            Measure commands
`tasks`               how tasks are ended
====================  ============================================================================
"""

"""Models that are loaded and unloaded while others serve, and the KV pages that they share.

====================  ============================================================================
`model_host`          the models of one worker, and the listener that hears of changes
`loader`              one model on its way in: what it needs, its pages, their contents
`load`                a Deploy as it runs: room, pages, contents, first request, service
`stage_load`          the same for one stage of a pipeline
`startup`             the models of the settings, loaded the same way before the engine starts
`unload`              a Retire as it runs: last requests, then every page back
`kv_sharing`          which model gets KV pages of which; pure
`deployments`         what the manager of morphs calls
====================  ============================================================================
"""

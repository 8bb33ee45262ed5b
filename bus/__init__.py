"""Redis Streams between the processes of Instar: the only code that services share.

This module imports nothing, so `bus.messages` can be used without Redis and msgspec.

    from bus.client import connect, BusFull, BusUnavailable, RedisProblem
    from bus.codec import encode, decode, DecodeError

    bus = connect(settings.redis, source="gateway")     # BadRedisUrl
    await bus.start(wait_s=10)                          # RedisProblem: not there, too old, password, ...
    bus.on_restart(callback)                            # callback(Restart(data_lost, run_id)); must not block
    bus.up, await bus.wait_up()                         # while Redis is away, writes fail at once

    await bus.publish(bus.names.events, message, ...)   # XADD, all or none; BusUnavailable, BusFull
    batch = bus.batch()                                 # several streams and acks in one MULTI
    batch.publish(stream, message); batch.ack(requests_stream, entry_id); await batch.send()
    await bus.event("worker_lost", worker, reason, epoch=epoch)
    await bus.trim(stream, before=entry_id)             # XTRIM MINID, exact

    reader = bus.reader(stream, StepOutput, start="0")  # XREAD; "$": from reader.open() (or first read) on
    async for batch in reader: ...                      # [(entry id, message), ...]; survives every outage
    await reader.next_batch(); await reader.read()      # one batch; `read` is [] after block_ms without any
    group = bus.group_reader(stream, consumer, Submit)  # XREADGROUP; creates its group if it is missing
    await group.open(); await group.claim_all()         # ends what earlier incarnations left pending
    await group.ack(ids)                                # XACK + XDEL, also at maxmemory

    await bus.register_worker(card, lease_s)            # card, membership, lease
    await bus.renew_lease(worker, epoch, lease_s)       # False: fenced; take a new epoch and register again
    await bus.update_card(card)                         # new state or progress; False: fenced
    await bus.drop_lease(worker, epoch)                 # clean exit
    await bus.workers()                                 # [LiveWorker(card, epoch, lease_ms)]
    await bus.renew_gateway(id), bus.drop_gateway(id), bus.live_gateways(ids)

    await bus.catalogue.read()                          # models, deployments, profiles: Contents
    await bus.catalogue.write(profile)                  # only the controller writes models and deployments
    entry = await bus.catalogue.order(order)            # the controller settles it, once:
    await bus.catalogue.await_answer(order.id, entry, within_s)     # None: not settled, and withdrawn

`on_restart` runs before any reader continues and before `workers()` returns the new server's workers. Wait
with `asyncio.timeout`, not `asyncio.wait_for`, which loses cancellations on Python 3.11.

=================  =====================================================================================
other modules      contents
=================  =====================================================================================
`bus.service`      the frame of a process: settings, logging, event loop, signals, exit status
`bus.settings`     all settings
`bus.precisions`   the table of precisions
`bus.policy`       the table of the morph policy's fields
`bus.morphs`       the table of kinds of morph
`bus.families`     the table of model families
`bus.histogram`    mergeable histograms and their percentiles
`bus.groups`       the tensor-parallel groups that workers can form
`bus.checkpoints`  facts of a model's folder
`bus.leftovers`    removal of the streams of dead workers, for the controller
=================  =====================================================================================
"""

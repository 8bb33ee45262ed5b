"""Redis Streams between the processes of Instar: the only thing the services share.

This module imports nothing, so that `bus.messages` stays usable where neither Redis nor msgspec is.

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
    async for batch in reader: ...                      # [(entry id, message), ...]; rides out every outage
    await reader.next_batch(); await reader.read()      # one batch; `read` is [] after block_ms without any
    group = bus.group_reader(stream, consumer, Submit)  # XREADGROUP; makes its group (again) when missing
    await group.open(); await group.claim_all()         # ends what earlier incarnations left pending
    await group.ack(ids)                                # XACK + XDEL, also at maxmemory

    await bus.register_worker(card, lease_s)            # card, membership, lease
    await bus.renew_lease(worker, epoch, lease_s)       # False: fenced; take a new epoch and register again
    await bus.update_card(card)                         # state or progress changed; False: fenced
    await bus.drop_lease(worker, epoch)                 # clean exit
    await bus.workers()                                 # [LiveWorker(card, epoch, lease_ms)]
    await bus.renew_gateway(id), bus.drop_gateway(id), bus.live_gateways(ids)

    await bus.catalogue.read()                          # models, deployments, profiles: Contents
    await bus.catalogue.write(profile)                  # models and deployments: by the controller alone
    entry = await bus.catalogue.order(order)            # and the controller settles it, once:
    await bus.catalogue.await_answer(order.id, entry, within_s)     # None: nobody took it, nobody will

A restart is told before any reader goes on and before `workers()` hands out the new server's picture.
Wait with `asyncio.timeout`, not `asyncio.wait_for`: the latter loses cancellations on Python 3.11.

Beside it: `bus.histogram` (Accumulator, merge, difference, quantile), `bus.logs.set_up`,
`bus.service.run(name, main)` (settings, logging, uvloop, SIGTERM, exit status of a process), `bus.pending`
and `bus.leftovers` (what the dead leave, for the controller), `bus.checkpoints` (a model's folder).
"""

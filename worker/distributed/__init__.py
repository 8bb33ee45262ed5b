"""Communication between workers, beside the bus.

====================  ============================================================================
`transport`           one listener per worker, authenticated links, frames with tensors
`messages`            all messages between workers
`rendezvous`          how ranks meet to make a communicator, and which communicators are kept
`communicator`        collective operations of one group of ranks: gloo, NCCL
`kv_exchange`         the KV cache of a layer changes its degree of tensor parallelism in place
`all_gather`          every rank sends its part of a layer's weights to its peers
`carriers`            how one stage of an exchange gets from rank to rank
`shared_buffers`      memory of each rank that the others of its host read
====================  ============================================================================
"""

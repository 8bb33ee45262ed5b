"""Device memory as pages: one pool of physical pages, address ranges they are mapped into.

======================  ==========================================================================
`PagePool`              owns the device's budget; hands pages to ranges
`VirtualRange`          a reserved run of addresses, partly mapped, and torch views of it
`CpuBackend`            pages of a memfd, mapped by `mmap(MAP_FIXED)`
`CudaBackend`           pages of a GPU, mapped by cuMemMap (`memory.cuda`, imported where CUDA is)
`Pinned`                host memory that a GPU copies from (`memory.pinned`, imported where CUDA is)
`KVCache`               one range per layer, seen as blocks; all layers grow and shrink together
`BlockAllocator`        the block numbers, free or in use: all of a cache, or a member's share of a group's
`PrefixIndex`           which blocks hold which tokens
======================  ==========================================================================
"""

from worker.memory.backend import BlocksInUse, BrokenInvariant, MappingFailed, OutOfBlocks, OutOfPages
from worker.memory.block_allocator import BlockAllocator, in_parts, plan_moves_below
from worker.memory.cpu import CpuBackend
from worker.memory.kv_cache import KVCache
from worker.memory.pool import PagePool, VirtualRange
from worker.memory.prefix_index import PrefixIndex

__all__ = [
    "BlockAllocator",
    "BlocksInUse",
    "BrokenInvariant",
    "CpuBackend",
    "KVCache",
    "MappingFailed",
    "OutOfBlocks",
    "OutOfPages",
    "PagePool",
    "PrefixIndex",
    "VirtualRange",
    "in_parts",
    "plan_moves_below",
]

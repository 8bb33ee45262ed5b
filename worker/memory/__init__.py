"""Device memory as pages: one pool of physical pages, address ranges they are mapped into.

======================  ==========================================================================
`PagePool`              owns the device's budget; hands pages to ranges
`VirtualRange`          address space with pages mapped where something lives; torch views on it
`CpuBackend`            a memfd is the physical memory, `mmap(MAP_FIXED)` maps it
`CudaBackend`           cuMemCreate, cuMemMap and friends (imported where CUDA is: `memory.cuda`)
`KVCache`               one range per layer, seen as blocks; grows and shrinks by pages in all of them
`BlockAllocator`        which block ids are free
`layouts`               the orders a KV cache can be stored in, as kernels see them
======================  ==========================================================================
"""

from worker.memory.backend import BlocksInUse, BrokenInvariant, MappingFailed, OutOfBlocks, OutOfPages
from worker.memory.cpu import CpuBackend
from worker.memory.kv_cache import BlockAllocator, KVCache
from worker.memory.pool import PagePool, VirtualRange

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
    "VirtualRange",
]

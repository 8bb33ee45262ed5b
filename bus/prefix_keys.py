"""Keys of KV blocks by what they hold: a chain of hashes over the tokens. Standard library only.

The key of a block is a hash over the key of the block before it and its own tokens, so it stands for every
token from the beginning on. The first one starts from the request's cache salt: requests with unlike salts
share nothing. A key has 256 bits, so two texts never meet in one by chance.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from hashlib import blake2b
from typing import Final

KEY_BYTES: Final = 32
MAX_DEPTH: Final = 64  # blocks of a prompt that the choice of an instance looks at
PUBLISHED_EVERY: Final = 4  # blocks: a report reaches so many times as many texts
DIGEST_BYTES: Final = 4  # bytes of a published key: a false match only costs a detour


def first_key(cache_salt: str) -> bytes:
    """Return the key before the first block of a request with this salt."""
    return blake2b(cache_salt.encode(), digest_size=KEY_BYTES).digest()


def next_key(key: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of the block with these tokens after the block with `key`."""
    return blake2b(array("q", token_ids).tobytes(), digest_size=KEY_BYTES, key=key).digest()


def prompt_digests(cache_salt: str, token_ids: Sequence[int], block_tokens: int) -> list[int]:
    """Return the shortened keys of the blocks of a prompt that workers publish, the first one first."""
    key, digests = first_key(cache_salt), []
    for depth in range(min(len(token_ids) // block_tokens, MAX_DEPTH)):
        key = next_key(key, token_ids[depth * block_tokens : (depth + 1) * block_tokens])
        if is_published(depth):
            digests.append(digest_of(key))
    return digests


def is_published(depth: int) -> bool:
    """Return whether workers publish the digest of a block with so many before it."""
    return depth < MAX_DEPTH and depth % PUBLISHED_EVERY == PUBLISHED_EVERY - 1


def num_blocks_found(digests: Sequence[int], published: Container[int]) -> int:
    """Return how many blocks of a prompt are cached where `published` are the digests.

    The first blocks of a text are kept longest, so the last digest that is there stands for all before it.
    """
    known = (n for n in range(len(digests), 0, -1) if digests[n - 1] in published)
    return next(known, 0) * PUBLISHED_EVERY


def digest_of(key: bytes) -> int:
    """Return the first bytes of a key as a number."""
    return int.from_bytes(key[:DIGEST_BYTES], "little")

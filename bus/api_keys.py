"""API keys: what each may do and how much of it, and the file that has them as digests.

The digest is one SHA-256 of a key: keys are made here from 24 random bytes, which nobody finds by trying.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final, Literal, get_args

Scope = Literal["inference", "admin-read", "admin-write"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key. A limit of 0 is none."""

    id: str  # the first 16 digits of its digest; "": the caller of a gateway without keys
    digest: str = ""  # SHA-256 of the key, in hexadecimal
    name: str = ""  # whose it is, for people
    scopes: tuple[Scope, ...] = ("inference",)
    weight: float = 1.0  # its share of tokens beside other keys where all wait, above 0
    rpm: int = 0  # requests per minute
    tpm: int = 0  # tokens per minute, prompt and output
    concurrent: int = 0  # requests at once
    created_s: int = 0  # Unix time; 0: from the settings


ANONYMOUS: Final = ApiKey(id="")


def digest_of(key: bytes) -> str:
    """Return the digest by which a key is known."""
    return hashlib.sha256(key).hexdigest()


def plain_key(key: str, *scopes: Scope) -> ApiKey:
    """Return a key of the settings, without limits."""
    digest = digest_of(key.encode())
    return ApiKey(id=digest[:16], digest=digest, scopes=scopes)

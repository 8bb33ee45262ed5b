"""Which files of a repository make a model, and why a repository is refused. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Final

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
# All that is read beside the weights, and the licence, which must stay with them.
COMPANIONS: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "licen[cs]e*",
    "notice*",
)


class BadRepository(ValueError):
    """The repository is not a model that can be served. The text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository at one commit."""

    name: str
    size: int  # bytes
    blob_id: str  # git's digest of the content, or of the pointer if the content is in large file storage
    sha256: str = ""  # of the content, where it is in large file storage

    @property
    def digest(self) -> str:
        return f"sha256:{self.sha256}" if self.sha256 else f"git:{self.blob_id}"


def companions(repo: str, files: Mapping[str, RemoteFile]) -> list[RemoteFile]:
    """Return what is fetched before the weights: config, tokenizer, template, index and licence.

    Raises BadRepository if there is no config or no safetensors.
    """
    if "config.json" not in files:
        raise BadRepository(f"{repo} has no config.json, so it is not a model in Hugging Face's format")
    if SINGLE not in files and INDEX not in files:
        raise BadRepository(_without_safetensors(repo, files))
    wanted = [file for name, file in sorted(files.items()) if _is_companion(name)]
    return wanted if SINGLE in files else [*wanted, files[INDEX]]


def weights(repo: str, files: Mapping[str, RemoteFile], index: bytes | None) -> list[RemoteFile]:
    """Return the files of weights. `index` is the content of INDEX where there is no SINGLE.

    Raises BadRepository if the index is not one, or names a file that is not there.
    """
    if index is None:
        return [files[SINGLE]]
    try:
        names = sorted(set(json.loads(index)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadRepository(f"{INDEX} of {repo} cannot be read: {error!r}") from None
    for name in names:
        if name not in files or not _is_weights(name):
            raise BadRepository(f"{INDEX} of {repo} names {name!r}, which is no safetensors file there")
    return [files[name] for name in names]


def total_size(files: Iterable[RemoteFile]) -> int:
    """Return the bytes of all files."""
    return sum(file.size for file in files)


def _is_companion(name: str) -> bool:
    return "/" not in name and any(fnmatch(name.lower(), pattern) for pattern in COMPANIONS)


def _is_weights(name: str) -> bool:
    return isinstance(name, str) and "/" not in name and name.endswith(".safetensors")


def _without_safetensors(repo: str, files: Mapping[str, RemoteFile]) -> str:
    pickles = sorted(name for name in files if fnmatch(name, "*.bin") and "/" not in name)
    if pickles:
        return (
            f"{repo} has no safetensors, but {pickles[0]}, a pickle, which could run code, so it is not "
            f"downloaded; fetch it with `hf download {repo} --local-dir DIR`, then `instar convert DIR "
            "TARGET` makes safetensors without running its code"
        )
    ggufs = sorted(name for name in files if name.endswith(".gguf"))
    if ggufs:
        return (
            f"{repo} has GGUF files alone ({ggufs[0]}), which are not read; pull the repository that they "
            "were made of"
        )
    return f"{repo} has neither {SINGLE} nor {INDEX}, so there are no weights to serve"

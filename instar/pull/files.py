"""Which files of a repository make a model, and why a repository is refused. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Final

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
LICENCES: Final = ("licen[cs]e*", "notice*")
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
    *LICENCES,
)
MOST_LISTED: Final = 20  # names of GGUF files in a message
_PART: Final = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


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
    has_weights = SINGLE in files or INDEX in files
    if not has_weights and (ggufs := _ggufs(files)):
        raise BadRepository(_only_gguf(repo, ggufs))
    if "config.json" not in files:
        raise BadRepository(f"{repo} has no config.json, so it is not a model in Hugging Face's format")
    if not has_weights:
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


def gguf_files(repo: str, files: Mapping[str, RemoteFile], name: str) -> list[RemoteFile]:
    """Return what is fetched for one GGUF file: the licence and the file.

    Raises BadRepository if it is not there, or is one of several parts.
    """
    there = _ggufs(files)
    if name not in there:
        others = f"these are there: {_listed(there)}" if there else "it has none"
        raise BadRepository(f"{repo} has no GGUF file {name!r}; {others}")
    if found := _PART.search(name):
        raise BadRepository(
            f"{name} is one of {int(found[1])} parts of a model, and parts are not read; take a file in one "
            "piece, or join them with `llama-gguf-split --merge` of llama.cpp"
        )
    licences = [file for one, file in sorted(files.items()) if _is_companion(one, LICENCES)]
    return [*licences, files[name]]


def total_size(files: Iterable[RemoteFile]) -> int:
    """Return the bytes of all files."""
    return sum(file.size for file in files)


def _is_companion(name: str, patterns: Sequence[str] = COMPANIONS) -> bool:
    return "/" not in name and any(fnmatch(name.lower(), pattern) for pattern in patterns)


def _ggufs(files: Mapping[str, RemoteFile]) -> list[str]:
    return sorted(name for name in files if name.endswith(".gguf") and "/" not in name)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return ", ".join(names[:MOST_LISTED]) + more


def _only_gguf(repo: str, ggufs: Sequence[str]) -> str:
    return (
        f"{repo} has no safetensors, but GGUF files; name the one to take, as in `instar pull {repo} "
        f"{ggufs[0]}`. There are: {_listed(ggufs)}"
    )


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
    return f"{repo} has neither {SINGLE} nor {INDEX}, so there are no weights to serve"

"""A hub on loopback: the routes that `huggingface_hub` asks for a model, and its files by ranges."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support.threaded_http import serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEWER = "89abcdef0123456789abcdef0123456789abcdef"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
}


def checkpoint(num_shards: int = 1, shard_bytes: int = 5000) -> dict[str, bytes]:
    """The files of a repository: those that are pulled, and some that are not. The weights are no tensors."""
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "generation_config.json": b"{}",
        "tokenizer.json": b'{"version": "1.0"}',
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "LICENSE": b"do as you like",
        "README.md": b"# a model",
        "pytorch_model.bin": b"a pickle",
        "onnx/model.onnx": b"another format",
        "consolidated.safetensors": b"the same once more",
    }
    if num_shards == 1:
        return files | {"model.safetensors": bytes(index % 251 for index in range(shard_bytes))}
    names = [f"model-{number:05}-of-{num_shards:05}.safetensors" for number in range(1, num_shards + 1)]
    index = {"weight_map": {f"tensor.{number}": name for number, name in enumerate(names)}}
    shards = {name: bytes([number]) * shard_bytes for number, name in enumerate(names)}
    return files | shards | {"model.safetensors.index.json": json.dumps(index).encode()}


@dataclass
class LoopbackHub:
    """`revisions`: commit of each branch; `files`: those of each commit."""

    url: str
    repo: str = "org/tiny"
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    files: dict[str, dict[str, bytes]] = field(default_factory=lambda: {COMMIT: checkpoint()})
    token: str = ""  # that must be sent
    is_gated: bool = False
    has_ranges: bool = True
    store: str = ""  # URL of another host, to which files are redirected
    sent_to_store: list[str] = field(default_factory=list)  # tokens, which it must not get
    breaks_after: dict[str, int] = field(default_factory=dict)  # bytes of a file, once each
    corrupt: set[str] = field(default_factory=set)  # files that come with another content
    asked: list[tuple[str, str]] = field(default_factory=list)  # path and range

    def ranges(self, name: str) -> list[str]:
        """The ranges for which a file was asked, "" for all of it."""
        return [range_ for path, range_ in self.asked if path.endswith(f"/{name}")]

    def siblings(self, commit: str) -> list[dict[str, Any]]:
        return [_sibling(name, content) for name, content in self.files[commit].items()]


def _sibling(name: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    found: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": blob}
    if name.endswith((".safetensors", ".bin")):
        digest = hashlib.sha256(content).hexdigest()
        found["lfs"] = {"size": len(content), "sha256": digest, "pointerSize": 130}
    return found


@contextmanager
def loopback_hub() -> Iterator[LoopbackHub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path, range_ = unquote(urlsplit(self.path).path), self.headers.get("range", "")
            hub.asked.append((path, range_))
            if found := re.fullmatch(r"/store/([0-9a-f]+)/(.+)", path):
                hub.sent_to_store.append(self.headers.get("authorization", ""))
                self._file(found[1], found[2], range_)
            elif hub.token and self.headers.get("authorization") != f"Bearer {hub.token}":
                self._refuse(401, "RepoNotFound")
            elif hub.is_gated:
                self._refuse(403, "GatedRepo")
            elif found := re.fullmatch(rf"/api/models/{hub.repo}(?:/revision/(.+))?", path):
                self._info(found[1] or "main")
            elif found := re.fullmatch(rf"/{hub.repo}/resolve/([0-9a-f]+)/(.+)", path):
                if hub.store:
                    self._send(302, b"", {"location": f"{hub.store}/store/{found[1]}/{found[2]}"})
                else:
                    self._file(found[1], found[2], range_)
            else:
                self._refuse(404, "RepoNotFound")

        def _info(self, revision: str) -> None:
            commit = hub.revisions.get(revision, revision)
            if commit not in hub.files:
                self._refuse(404, "RevisionNotFound")
                return
            info = {"id": hub.repo, "sha": commit, "siblings": hub.siblings(commit)}
            self._send(200, json.dumps(info).encode(), {"content-type": "application/json"})

        def _file(self, commit: str, name: str, range_: str) -> None:
            content = hub.files.get(commit, {}).get(name)
            if content is None:
                self._refuse(404, "EntryNotFound")
                return
            if name in hub.corrupt:
                content = bytes(len(content))
            start = int(range_.removeprefix("bytes=").partition("-")[0] or 0) if hub.has_ranges else 0
            headers = {"etag": f'"{hashlib.sha1(content).hexdigest()}"', "x-repo-commit": commit}
            if start:
                headers["content-range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            rest = content[start:]
            self._send(206 if start else 200, rest, headers, hub.breaks_after.pop(name, len(rest)))

        def _refuse(self, status: int, code: str) -> None:
            self._send(status, b"{}", {"x-error-code": code, "x-error-message": code})

        def _send(
            self, status: int, body: bytes, headers: dict[str, str], num_sent: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body[:num_sent])
            if num_sent is not None and num_sent < len(body):
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as url:
        hub = LoopbackHub(url)
        yield hub

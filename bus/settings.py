"""All settings of all processes: defaults, one TOML file and `INSTAR_*` variables, in rising priority.

The file is `instar.toml` in the working directory, or the one that `INSTAR_CONFIG` names. A variable is the
section and the key joined by two underscores: `INSTAR_GATEWAY__PORT=8001`. A few have short names: see
SHORT_NAMES. A list in a variable is JSON (`["a", "b"]`) or separated by commas. An unknown key is an error
that names the file or variable, the key and the value. `repr=False` marks a secret.
"""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from bus import settings_sources as sources
from bus.precisions import QUANTIZED, KVPrecision
from bus.settings_sources import Layer, SettingsError

__all__ = ["Settings", "SettingsError", "ToolFormatName", "load_settings", "settings_environment"]


MIN_KEY_CHARACTERS: Final = 8

# The ways in which models call tools (`gateway.openai.tools.formats`).
ToolFormatName = Literal["hermes", "mistral", "llama3"]


class Section(BaseModel):
    """A section of the file: frozen, and without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _list_from_text(cls, value: Any, info: ValidationInfo) -> Any:
        """Turn a list that a variable holds as text into a list."""
        field = cls.model_fields[info.field_name or ""]
        if field.annotation != list[str] or not isinstance(value, str):
            return value
        if value.lstrip().startswith("["):
            try:
                return json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"it begins like a JSON list but is not one: {error}") from error
        return [part.strip() for part in value.split(",") if part.strip()]


def _key(default: Any, description: str, **limits: Any) -> Any:
    return Field(default, description=description, **limits)


class RedisSettings(Section):
    """The bus."""

    url: str = _key(
        "", "redis[s]://[user[:password]@]host:port/db; empty: instar serve starts a server", repr=False
    )
    password_file: str = _key("", "file of the password; in it and in url, {role} is gateway, worker, ...")
    ssl_ca_certs: str = _key("", "PEM file of rediss://'s authority; empty: the system's authorities")
    sentinels: list[str] = _key(
        [], "host:port of each Redis Sentinel; the host in url is then what they call the primary"
    )
    sentinel_password_file: str = _key("", "file of the Sentinels' password; empty: they ask for none")
    prefix: str = _key("instar:", "prefix of every key")
    socket_timeout_s: float = _key(7.0, "without an answer for this long, the connection is lost", gt=0)
    block_ms: int = _key(2000, "longest blocking read; must stay below socket_timeout_s", gt=0, le=5000)
    maxmemory_mb: int = _key(256, "memory limit of the embedded server (noeviction)", ge=16)
    folder: str = _key(
        "",
        "where the embedded server keeps deployments, policy and profiles over restarts; empty: nowhere",
    )

    @field_validator("sentinels")
    @classmethod
    def _sentinels_have_ports(cls, entries: list[str]) -> list[str]:
        for entry in entries:
            try:
                parts = urlsplit(f"//{entry}")
                is_address = parts.netloc == entry and "@" not in entry and parts.hostname and parts.port
            except ValueError:
                is_address = False
            if not is_address:
                raise ValueError(f"{entry!r} is not host:port; the port of a Sentinel is usually 26379")
        return entries

    @model_validator(mode="after")
    def _sentinels_watch_a_primary(self) -> Self:
        if not self.sentinels:
            if self.sentinel_password_file:
                raise ValueError("sentinel_password_file is set and sentinels is empty: name them, too")
            return self
        scheme, _, rest = self.url.partition("://")
        name = rest.partition("/")[0].rpartition("@")[2]
        if scheme not in ("redis", "rediss") or not name or ":" in name:
            raise ValueError(
                "with sentinels, url is redis[s]://[user[:password]@]NAME[/db], where NAME is what the "
                "Sentinels call the primary (`sentinel monitor NAME ...`), without a port"
            )
        return self

    @model_validator(mode="after")
    def _authorities_are_of_tls(self) -> Self:
        if self.ssl_ca_certs and self.url and not self.url.startswith("rediss://"):
            raise ValueError(
                "ssl_ca_certs is set and url does not begin with rediss://, so nothing is encrypted"
            )
        return self

    @model_validator(mode="after")
    def _reads_end_before_the_timeout(self) -> Self:
        if self.block_ms >= self.socket_timeout_s * 1000:
            raise ValueError(
                f"block_ms = {self.block_ms} must stay below socket_timeout_s = {self.socket_timeout_s}: "
                "otherwise every read without new entries looks like a lost connection"
            )
        return self


class GatewaySettings(Section):
    """HTTP in, tokens out."""

    host: str = _key("127.0.0.1", "address to listen on; other than loopback needs api_keys or keys_file")
    port: int = _key(8000, "port to listen on; 0: a free one", ge=0, le=65535)
    published_host: str = _key("", "in a container: the host address that the port is published on")
    ssl_certfile: str = _key("", "PEM file of the certificate, for HTTPS alone; empty: HTTP")
    ssl_keyfile: str = _key("", "PEM file of its key; empty: it is in ssl_certfile")
    id: str = _key("", "unique name; empty: made from host name, process id and chance")
    api_keys: list[str] = _key([], "keys of /v1, 8 characters or more; none: loopback only", repr=False)
    admin_keys: list[str] = _key([], "keys of /admin, likewise; none: loopback only", repr=False)
    keys_file: str = _key("", "file of keys with scopes and limits, which `instar keys` writes; empty: none")
    cors_origins: list[str] = _key([], "origins whose pages may call /v1; *: any, which takes a key")
    max_queue: int = _key(256, "requests that may wait to run; more get a 503", ge=1)
    max_inflight: int = _key(2048, "requests that may wait or run; more get a 503", ge=1)
    max_body_bytes: int = _key(4 * 1024 * 1024, "a larger body gets a 413", ge=1024)
    max_connections: int = _key(4096, "open connections; above that, silent ones are closed", ge=1)
    header_timeout_s: float = _key(10.0, "a connection that sends no request for this long is closed", gt=0)
    write_timeout_s: float = _key(30.0, "a client that takes nothing of an answer so long is cut off", gt=0)
    max_n_tokens: int = _key(131072, "most tokens of an answer: prompts times n times max_tokens", ge=1)
    max_call_mb: int = _key(64, "memory that one call may take here until it ends; more gets a 400", ge=1)
    max_inflight_mb: int = _key(1024, "memory for the prompts and answers of all calls; then a 503", ge=1)
    default_max_tokens: int = _key(16, "default of /v1/completions, as OpenAI's; chat: the context", ge=1)
    rate_limit_rpm: int = _key(0, "requests per minute and key; more get a 429; 0: no limit", ge=0)
    rate_limit_concurrent: int = _key(0, "requests at once per key; more get a 429; 0: no limit", ge=0)
    queue_timeout_s: float = _key(60.0, "longest wait for the first step; then a 504", gt=0)
    keepalive_s: float = _key(10.0, "a stream without output for this long gets a comment line", gt=0)
    stream_buffer_tokens: int = _key(4096, "tokens held for a slow reader; above that: an error", ge=16)
    max_attempts: int = _key(4, "attempts to run a request before it fails", ge=1)
    replay: bool = _key(True, "continue requests elsewhere after a worker's death; false: an error event")
    drain_timeout_s: float = _key(30.0, "time for streams to end after SIGTERM", ge=0)
    metrics_compat: Literal["", "vllm"] = _key(
        "", '"vllm": also export metrics under the vllm: names that routers read'
    )
    tool_formats: list[str] = _key(
        [], "`model=format` for models whose chat template does not tell: hermes, mistral, llama3 or none"
    )

    @field_validator("api_keys", "admin_keys")
    @classmethod
    def _keys_are_keys(cls, keys: list[str]) -> list[str]:
        """Refuse what an unset variable or a slip leaves behind, and what is guessed soon."""
        for number, key in enumerate(keys, 1):
            if len(key) < MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError(
                    f"key {number} of {len(keys)} has {len(key)} characters; a key has {MIN_KEY_CHARACTERS} "
                    "or more, printable ASCII without blanks: `openssl rand -hex 24` makes one"
                )
        return keys

    @field_validator("cors_origins")
    @classmethod
    def _origins_are_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            parts = urlsplit(origin)
            whole = f"{parts.scheme}://{parts.netloc}"
            if origin != "*" and (
                parts.scheme not in ("http", "https") or not parts.netloc or whole != origin
            ):
                raise ValueError(
                    f"{origin!r} is no origin: https://host, with a port or without, and no path"
                )
        return origins

    @field_validator("tool_formats")
    @classmethod
    def _formats_exist(cls, entries: list[str]) -> list[str]:
        names = (*get_args(ToolFormatName), "none")
        for entry in entries:
            model, _, name = entry.rpartition("=")
            if not model or name not in names:
                raise ValueError(f"{entry!r} is no `model=format`; the formats are {', '.join(names)}")
        return entries

    @model_validator(mode="after")
    def _not_for_everyone(self) -> Self:
        if "*" in self.cors_origins and not (self.api_keys or self.keys_file):
            raise ValueError(
                'cors_origins = ["*"] without api_keys would let every page that a user of this machine '
                "visits call /v1: set a key, or name the origins"
            )
        return self

    @model_validator(mode="after")
    def _key_has_a_certificate(self) -> Self:
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ValueError("ssl_keyfile is set and ssl_certfile is empty: name the certificate, too")
        return self

    @model_validator(mode="after")
    def _one_call_is_not_more_than_all(self) -> Self:
        if self.max_call_mb > self.max_inflight_mb:
            raise ValueError(
                f"max_call_mb = {self.max_call_mb} is more than max_inflight_mb = {self.max_inflight_mb}: "
                "such a call would be refused for ever"
            )
        return self

    @property
    def loopback_only(self) -> bool:
        """True if only this machine can connect. In a container `published_host` counts, not `host`."""
        return is_loopback(self.published_host or self.host)


class MonitorSettings(Section):
    """Telemetry in, smoothed metrics out."""

    interval_s: float = _key(0.5, "interval of metrics under load", gt=0)
    idle_interval_s: float = _key(2.0, "interval of metrics while nothing runs", gt=0)
    window_s: float = _key(10.0, "window of rates and percentiles", gt=0)
    smoothing: float = _key(0.5, "weight of the newest value in moving averages", gt=0, le=1)
    stale_s: float = _key(5.0, "older telemetry is ignored", gt=0)


class ControllerSettings(Section):
    """Leases, morphs and deployments."""

    interval_s: float = _key(1.0, "interval at which leases are checked", gt=0)
    grace_s: float = _key(2.0, "time after Redis is back until a missing lease means a dead worker", ge=0)
    lease_s: float = _key(
        3.0, "another controller leads after this long without a sign of the one that did", gt=0.3
    )
    placement: Literal["least-loaded", "packing", "hybrid"] = _key(
        "hybrid", "choice of workers for a deployment; hybrid packs those below placement_threshold"
    )
    placement_threshold: float = _key(
        0.3, "busy share of load_window_s up to which a worker gets another model", gt=0, le=1
    )
    load_window_s: float = _key(120.0, "window of a worker's load; idle for this long counts as free", gt=0)
    change_cooldown_s: float = _key(120.0, "time before a deployment is changed; failures double it", gt=0)


STEP_DEFAULTS: Final = {
    "cpu": {"max_num_seqs": 64, "max_num_batched_tokens": 512},
    "cuda": {"max_num_seqs": 256, "max_num_batched_tokens": 8192},
}


class WorkerSettings(Section):
    """One worker process per device."""

    id: str = _key("", "unique name; empty: made from host name and index")
    models: list[str] = _key([], "model folders to serve; `name=dir` sets the served name")
    may_be_empty: bool = _key(False, "start without a model and wait for deployments")
    device: str = _key("", '"cpu", "cuda:0", ...; empty: a GPU if there is one, else the CPU')
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _key(
        "auto", "auto: float32 on a CPU, else the checkpoint's"
    )
    load_format: Literal["safetensors", "dummy"] = _key("safetensors", "dummy: random weights")
    memory_mb: int = _key(0, "memory for weights and KV; 0: 2048 on a CPU, 90 % of a free GPU", ge=0)
    page_kib: int = _key(0, "page size; 0: 64 on a CPU; on a GPU 2048, and 8192 where max_tp is 1", ge=0)
    block_tokens: int = _key(16, "tokens in a KV block", ge=1)
    kv_dtype: KVPrecision = _key("full", "the KV cache; full: in the model's dtype, int8: in 8 bits")
    prefix_cache: bool = _key(True, "requests share the KV blocks of equal beginnings")
    max_model_len: int = _key(0, "longest sequence; 0: what the model's config says", ge=0)
    max_num_seqs: int = _key(0, "most sequences in one step; 0: 64 on a CPU, 256 on a GPU", ge=0)
    max_num_batched_tokens: int = _key(
        0, "most tokens in one step: the chunk of a prefill; 0: 512 on a CPU, 8192 on a GPU", ge=0
    )
    max_tp: int = _key(
        0, "highest tensor-parallel degree that weights are padded for; 0: 4, or 1 if it is alone", ge=0, le=8
    )
    variants: list[str] = _key(list(QUANTIZED), "precisions that layers may be swapped to; empty: no swaps")
    quantization: Literal["", "awq", "gptq", "rtn"] = _key(
        "", "method of the variants; empty: the best set in the model's folder, else rtn at load"
    )
    layer_order: Literal["", "profile", "front-to-back", "back-to-front", "random"] = _key(
        "", "order of swaps; empty: the model's profile, without one front-to-back"
    )
    morph_share: float = _key(0.04, "share of a busy engine's time for morphs: more is faster", gt=0, le=1)
    layers_per_step: int = _key(1, "layers that change their tensor-parallel degree between two steps", ge=1)
    group_host: str = _key("127.0.0.1", "address for its groups and pipelines; empty: it joins none")
    ssl_certfile: str = _key("", "PEM file of its certificate, for links to other workers; empty: no TLS")
    ssl_keyfile: str = _key("", "PEM file of its key; empty: it is in ssl_certfile")
    ssl_ca_certs: str = _key("", "PEM file of the authority that signs all workers' certificates")
    group_timeout_s: float = _key(20.0, "a member of a group is lost after this long without a sign", gt=0)
    host_dir: str = _key(
        "/dev/shm", "folder in memory for all variants of all layers; the workers of a host share it"
    )
    host_memory_mb: int = _key(
        0,
        "host memory for variants, all of which lie in disk_dir; 0: they lie in host_dir, without room 1024",
        ge=0,
    )
    disk_dir: str = _key("/var/tmp", "folder on a disk for variants that host_dir does not hold; empty: none")
    threads: int = _key(0, "CPU threads of the kernels; 0: all cores", ge=0)
    product_kernel: str = _key(
        "",
        "kernels of products on a CPU: few, row, pairs, lanes, torch, vnni, amx, decode; empty: the fastest",
    )
    cuda_graphs: Literal["auto", "off"] = _key(
        "auto", "short steps on a GPU as CUDA graphs, one for each half of a layer; off: call by call"
    )
    spin: bool = _key(False, "CPU threads spin while they wait: faster if nothing else needs the cores")
    lease_s: float = _key(3.0, "a worker is dead after this long without a sign", gt=0.3)
    publish_ms: float = _key(
        10.0, "tokens made within this time are sent together; first and last ones at once", ge=0, le=1000
    )
    telemetry_s: float = _key(0.25, "interval of reports under load", gt=0)
    idle_telemetry_s: float = _key(1.0, "interval of reports while nothing runs", gt=0)
    watchdog_s: float = _key(60.0, "a step that takes longer ends the process", gt=0)
    drain_timeout_s: float = _key(30.0, "time for requests to finish after SIGTERM", ge=0)

    @model_validator(mode="after")
    def _links_have_an_authority(self) -> Self:
        if bool(self.ssl_certfile) != bool(self.ssl_ca_certs) or (self.ssl_keyfile and not self.ssl_certfile):
            raise ValueError(
                "ssl_certfile and ssl_ca_certs go together: both ends of a link show a certificate of that "
                "authority; set both, or none"
            )
        return self

    @model_validator(mode="after")
    def _bounded_memory_has_a_disk(self) -> Self:
        if self.host_memory_mb and not self.disk_dir:
            raise ValueError(
                f"host_memory_mb = {self.host_memory_mb} and disk_dir is empty: name a folder on a disk that"
                " the variants are read from, or set host_memory_mb = 0"
            )
        return self

    def in_force(self, device: str) -> Self:
        """Return the settings of a worker on a "cpu" or "cuda" device: no zero stands for a default.

        docs/structure.md has the reasons for the numbers. A worker is alone if it has no address for others
        (`group_host`); where `instar serve` starts a single one, it sets `max_tp`.
        """
        defaults = STEP_DEFAULTS[device] | {"max_tp": 4 if self.group_host else 1}
        return self.model_copy(
            update={name: value for name, value in defaults.items() if not getattr(self, name)}
        )

    @field_validator("variants")
    @classmethod
    def _variants_exist(cls, value: list[str]) -> list[str]:
        if unknown := [name for name in value if name not in QUANTIZED]:
            raise ValueError(f"{unknown[0]!r} is not a variant; use {', '.join(QUANTIZED)}")
        return value

    @model_validator(mode="after")
    def _kv_blocks_are_whole_words(self) -> Self:
        if self.kv_dtype != "full" and self.block_tokens % 2:
            raise ValueError(
                f"kv_dtype {self.kv_dtype!r} needs an even block_tokens, not {self.block_tokens}; use 16"
            )
        return self


class SloSettings(Section):
    """Latency goals, shown in the dashboard; no decision depends on them."""

    ttft_s: float = _key(2.0, "from a request's arrival to its first token", gt=0)
    tpot_s: float = _key(0.1, "mean time between the tokens after it", gt=0)


class TracingSettings(Section):
    """OpenTelemetry traces of requests: docs/tracing.md."""

    endpoint: str = _key("", "OTLP over HTTP, http://host:4318; empty: off. Needs pip install 'instar[otel]'")
    sample: float = _key(1.0, "share of requests traced, where no traceparent decides", ge=0, le=1)
    service_name: str = _key("instar", "service name of the traces", min_length=1)

    @field_validator("endpoint")
    @classmethod
    def _is_a_url(cls, value: str) -> str:
        parts = urlsplit(value)
        if value and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError(f"{value!r} is not a URL like http://127.0.0.1:4318")
        return value

    @property
    def url(self) -> str:
        """The URL for spans: the endpoint, with OTLP's path if it has none."""
        return (
            self.endpoint
            if urlsplit(self.endpoint).path.strip("/")
            else f"{self.endpoint.rstrip('/')}/v1/traces"
        )


class ServeSettings(Section):
    """`instar serve`: the processes of one machine."""

    workers: int = _key(1, "worker processes", ge=1, le=64)
    restart_backoff_s: float = _key(0.5, "first pause before a dead process is restarted; doubles", gt=0)
    restart_backoff_max_s: float = _key(30.0, "longest pause", gt=0)
    stop_timeout_s: float = _key(15.0, "time for a process to end; then it is killed", gt=0)


class LogSettings(Section):
    """The log on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    json_lines: bool = _key(False, "JSON objects, one a line, instead of text")


class Settings(Section):
    """All sections."""

    redis: RedisSettings = RedisSettings()
    gateway: GatewaySettings = GatewaySettings()
    monitor: MonitorSettings = MonitorSettings()
    controller: ControllerSettings = ControllerSettings()
    worker: WorkerSettings = WorkerSettings()
    slo: SloSettings = SloSettings()
    tracing: TracingSettings = TracingSettings()
    serve: ServeSettings = ServeSettings()
    log: LogSettings = LogSettings()


SHORT_NAMES = {
    "PORT": "gateway.port",
    "HOST": "gateway.host",
    "REDIS_URL": "redis.url",
    "WORKERS": "serve.workers",
    "MODEL": "worker.models",
}


def load_settings(
    path: Path | None = None, *, environ: Mapping[str, str] | None = None, flags: Layer | None = None
) -> Settings:
    """Return the settings: flags win over INSTAR_* variables, these over the file, the file over defaults.

    Raises SettingsError with every problem of the first layer that has one: origin, key, value, what would be
    accepted.
    """
    return sources.merge(Settings, layers_of(path, os.environ if environ is None else environ, flags))


def layers_of(path: Path | None, environ: Mapping[str, str], flags: Layer | None = None) -> list[Layer]:
    """Return the values of each source, not validated. Raises SettingsError for unknown names."""
    file = sources.config_file(path, environ)
    return [
        sources.read_file(file, Settings) if file else {},
        sources.read_environment(environ, Settings, SHORT_NAMES),
        flags or {},
    ]


def settings_environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` changed so that a child process gets exactly these settings, without a file."""
    kept = {name: value for name, value in environ.items() if not name.startswith(sources.PREFIX)}
    own = {sources.CONFIG_VARIABLE: ""}
    defaults = Settings()
    for name in sources.fields_of(Settings):
        section, key = name.split(".")
        value = getattr(getattr(settings, section), key)
        if value != getattr(getattr(defaults, section), key):
            own[sources.variable_of(name)] = value if isinstance(value, str) else json.dumps(value)
    return kept | own


def is_loopback(host: str) -> bool:
    """Return True for localhost and addresses of the loopback network, not for other names or ""."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

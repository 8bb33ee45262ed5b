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
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from bus.precisions import QUANTIZED
from bus.settings_sources import (
    CONFIG_VARIABLE,
    PREFIX,
    Layer,
    SettingsError,
    config_file,
    fields_of,
    merge,
    read_environment,
    read_file,
    variable_of,
)

__all__ = ["Settings", "SettingsError", "load_settings", "settings_environment"]


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


class RedisSettings(Section):
    """The bus."""

    url: str = Field(
        "", repr=False, description="redis://[:password@]host:port/db; empty: instar serve starts a server"
    )
    prefix: str = Field("instar:", description="prefix of every key")
    socket_timeout_s: float = Field(
        7.0, gt=0, description="without an answer for this long, the connection is lost"
    )
    block_ms: int = Field(
        2000, gt=0, le=5000, description="longest blocking read; must stay below socket_timeout_s"
    )
    maxmemory_mb: int = Field(256, ge=16, description="memory limit of the embedded server (noeviction)")

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

    host: str = Field("127.0.0.1", description="address to listen on; other than loopback needs api_keys")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0: a free one")
    published_host: str = Field(
        "", description="in a container: the host address that the port is published on"
    )
    id: str = Field("", description="unique name; empty: made from host name and process id")
    api_keys: list[str] = Field(
        default_factory=list, repr=False, description="keys of /v1; empty: no key needed, loopback only"
    )
    admin_keys: list[str] = Field(
        default_factory=list, repr=False, description="keys of /admin; empty: no key needed, loopback only"
    )
    max_queue: int = Field(256, ge=1, description="requests that may wait to run; more get a 503")
    max_inflight: int = Field(2048, ge=1, description="requests that may wait or run; more get a 503")
    max_body_bytes: int = Field(4 * 1024 * 1024, ge=1024, description="a larger body gets a 413")
    max_connections: int = Field(
        4096, ge=1, description="open connections; above that, silent ones are closed"
    )
    header_timeout_s: float = Field(
        10.0, gt=0, description="a connection that sends no request for this long is closed"
    )
    max_n_tokens: int = Field(131072, ge=1, description="most n (or prompts) times max_tokens in one call")
    default_max_tokens: int = Field(
        16, ge=1, description="default of /v1/completions, as OpenAI's; chat fills the context"
    )
    rate_limit_rpm: int = Field(
        0, ge=0, description="requests per minute and key; more get a 429; 0: no limit"
    )
    rate_limit_concurrent: int = Field(
        0, ge=0, description="requests at once per key; more get a 429; 0: no limit"
    )
    queue_timeout_s: float = Field(60.0, gt=0, description="longest wait for the first step; then a 504")
    keepalive_s: float = Field(
        10.0, gt=0, description="a stream without output for this long gets a comment line"
    )
    stream_buffer_tokens: int = Field(
        4096, ge=16, description="tokens held for a slow reader; above that its stream ends with an error"
    )
    max_attempts: int = Field(4, ge=1, description="attempts to run a request before it fails")
    replay: bool = Field(
        True, description="continue requests elsewhere after a worker's death; false: an error event"
    )
    drain_timeout_s: float = Field(30.0, ge=0, description="time for streams to end after SIGTERM")
    metrics_compat: Literal["", "vllm"] = Field(
        "", description='"vllm": also export metrics under the vllm: names that routers read'
    )

    @property
    def loopback_only(self) -> bool:
        """True if only this machine can connect, so keys may be missing.

        In a container `host` is 0.0.0.0 and the runtime publishes the port: `published_host` then counts.
        """
        return is_loopback(self.published_host or self.host)


class MonitorSettings(Section):
    """Telemetry in, smoothed metrics out."""

    interval_s: float = Field(0.5, gt=0, description="interval of metrics under load")
    idle_interval_s: float = Field(2.0, gt=0, description="interval of metrics while nothing runs")
    window_s: float = Field(10.0, gt=0, description="window of rates and percentiles")
    smoothing: float = Field(0.5, gt=0, le=1, description="weight of the newest value in moving averages")
    stale_s: float = Field(5.0, gt=0, description="older telemetry is ignored")


class ControllerSettings(Section):
    """Leases, morphs and deployments."""

    interval_s: float = Field(1.0, gt=0, description="interval at which leases are checked")
    grace_s: float = Field(
        2.0, ge=0, description="time after Redis is back until a missing lease means a dead worker"
    )
    placement: Literal["least-loaded", "packing", "hybrid"] = Field(
        "hybrid",
        description="choice of workers for a deployment; hybrid packs those below placement_threshold",
    )
    placement_threshold: float = Field(
        0.3, gt=0, le=1, description="busy share of load_window_s up to which a worker gets another model"
    )
    load_window_s: float = Field(
        120.0, gt=0, description="window of a worker's load; a worker idle for this long counts as free"
    )
    change_cooldown_s: float = Field(
        120.0, gt=0, description="time before a deployment is changed; doubles after each failure"
    )


class WorkerSettings(Section):
    """One worker process per device."""

    id: str = Field("", description="unique name; empty: made from host name and index")
    models: list[str] = Field(
        default_factory=list, description="model folders to serve; `name=dir` sets the served name"
    )
    may_be_empty: bool = Field(False, description="start without a model and wait for deployments")
    device: str = Field("", description='"cpu", "cuda:0", ...; empty: a GPU if there is one, else the CPU')
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on a CPU, else the checkpoint's"
    )
    load_format: Literal["safetensors", "dummy"] = Field("safetensors", description="dummy: random weights")
    memory_mb: int = Field(
        0, ge=0, description="memory for weights and KV; 0: 2048 on a CPU, 90 % of free memory on a GPU"
    )
    page_kib: int = Field(0, ge=0, description="page size; 0: 64 on a CPU, 2048 on a GPU")
    block_tokens: int = Field(16, ge=1, description="tokens in a KV block")
    max_model_len: int = Field(0, ge=0, description="longest sequence; 0: what the model's config says")
    max_num_seqs: int = Field(64, ge=1, description="most sequences in one step")
    max_num_batched_tokens: int = Field(
        512, ge=1, description="most tokens in one step: the chunk of a prefill"
    )
    max_tp: int = Field(
        4, ge=1, le=8, description="highest tensor-parallel degree that weights are padded for"
    )
    variants: list[str] = Field(
        list(QUANTIZED), description="precisions that layers may be swapped to; empty: no swaps"
    )
    quantization: Literal["", "awq", "gptq", "rtn"] = Field(
        "", description="method of the variants; empty: the best set in the model's folder, else rtn at load"
    )
    layer_order: Literal["", "profile", "front-to-back", "back-to-front", "random"] = Field(
        "", description="order of swaps; empty: the model's profile, without one front-to-back"
    )
    morph_share: float = Field(
        0.04, gt=0, le=1, description="share of a busy engine's time for morphs; more makes them faster"
    )
    layers_per_step: int = Field(
        1, ge=1, description="layers that change their tensor-parallel degree between two steps"
    )
    group_host: str = Field(
        "127.0.0.1", description="address for members of its groups and pipelines; empty: it joins none"
    )
    group_timeout_s: float = Field(
        20.0, gt=0, description="a member of a group or pipeline is lost after this long without a sign"
    )
    host_dir: str = Field(
        "/dev/shm",
        description="folder in memory for all variants of all layers; the workers of a host share it",
    )
    threads: int = Field(0, ge=0, description="CPU threads of the kernels; 0: all cores")
    spin: bool = Field(
        False, description="CPU threads spin while they wait: faster if nothing else needs the cores"
    )
    lease_s: float = Field(3.0, gt=0.3, description="a worker is dead after this long without a sign")
    telemetry_s: float = Field(0.25, gt=0, description="interval of reports under load")
    idle_telemetry_s: float = Field(1.0, gt=0, description="interval of reports while nothing runs")
    watchdog_s: float = Field(60.0, gt=0, description="a step that takes longer ends the process")
    drain_timeout_s: float = Field(30.0, ge=0, description="time for requests to finish after SIGTERM")

    @field_validator("variants")
    @classmethod
    def _variants_exist(cls, value: list[str]) -> list[str]:
        if unknown := [name for name in value if name not in QUANTIZED]:
            raise ValueError(f"{unknown[0]!r} is not a variant; use {', '.join(QUANTIZED)}")
        return value


class SloSettings(Section):
    """Latency goals, shown in the dashboard; no decision depends on them."""

    ttft_s: float = Field(2.0, gt=0, description="from a request's arrival to its first token")
    tpot_s: float = Field(0.1, gt=0, description="mean time between the tokens after it")


class TracingSettings(Section):
    """OpenTelemetry traces of requests: docs/tracing.md."""

    endpoint: str = Field(
        "", description="OTLP over HTTP, http://host:4318; empty: off. Needs pip install 'instar[otel]'"
    )
    sample: float = Field(
        1.0, ge=0, le=1, description="share of requests traced; a caller's traceparent decides for its own"
    )
    service_name: str = Field("instar", min_length=1, description="service name of the traces")

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

    workers: int = Field(1, ge=1, le=64, description="worker processes")
    restart_backoff_s: float = Field(
        0.5, gt=0, description="first pause before a dead process is restarted; doubles"
    )
    restart_backoff_max_s: float = Field(30.0, gt=0, description="longest pause")
    stop_timeout_s: float = Field(15.0, gt=0, description="time for a process to end; then it is killed")


class LogSettings(Section):
    """The log on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    json_lines: bool = Field(False, description="JSON objects, one a line, instead of text")


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
    return merge(Settings, layers_of(path, os.environ if environ is None else environ, flags))


def layers_of(path: Path | None, environ: Mapping[str, str], flags: Layer | None = None) -> list[Layer]:
    """Return the values of each source, not validated. Raises SettingsError for unknown names."""
    file = config_file(path, environ)
    return [
        read_file(file, Settings) if file else {},
        read_environment(environ, Settings, SHORT_NAMES),
        flags or {},
    ]


def settings_environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` changed so that a child process gets exactly these settings, without a file."""
    kept = {name: value for name, value in environ.items() if not name.startswith(PREFIX)}
    own = {CONFIG_VARIABLE: ""}
    defaults = Settings()
    for name in fields_of(Settings):
        section, key = name.split(".")
        value = getattr(getattr(settings, section), key)
        if value != getattr(getattr(defaults, section), key):
            own[variable_of(name)] = value if isinstance(value, str) else json.dumps(value)
    return kept | own


def is_loopback(host: str) -> bool:
    """Return True for localhost and addresses of the loopback network, not for other names or ""."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

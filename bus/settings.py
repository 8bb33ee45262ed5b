"""All settings of all processes: one TOML file, `INSTAR_*` variables over it, defaults under it.

The file is `instar.toml` in the working directory, or what `INSTAR_CONFIG` names. A variable is the section
and the key joined by two underscores: `INSTAR_GATEWAY__PORT=8001`. A few have short names people type:
`INSTAR_PORT`, `INSTAR_HOST`, `INSTAR_REDIS_URL`, `INSTAR_WORKERS`, `INSTAR_MODEL`.
An unknown key, in the file or in a section's variable, is an error that names file, key and value.
Lists in a variable are JSON (`["a", "b"]`) or separated by commas. `repr=False` marks a secret.
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
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _list_from_text(cls, value: Any, info: ValidationInfo) -> Any:
        """A list may be written as one string, since that is all a variable can hold."""
        field = cls.model_fields[info.field_name or ""]
        if field.annotation != list[str] or not isinstance(value, str):
            return value
        if value.lstrip().startswith("["):
            try:
                return json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"begins like a JSON list and is none: {error}") from error
        return [part.strip() for part in value.split(",") if part.strip()]


class RedisSettings(Section):
    """The bus."""

    url: str = Field(
        "", repr=False, description="redis://[:password@]host:port/db; empty: instar serve starts its own"
    )
    prefix: str = Field("instar:", description="first part of every key")
    socket_timeout_s: float = Field(7.0, gt=0, description="an answer later than this is a lost connection")
    block_ms: int = Field(2000, gt=0, le=5000, description="longest blocking read; stays under the timeout")
    maxmemory_mb: int = Field(256, ge=16, description="limit of the embedded server (noeviction)")

    @model_validator(mode="after")
    def _reads_end_before_the_timeout(self) -> Self:
        if self.block_ms >= self.socket_timeout_s * 1000:
            raise ValueError(
                f"block_ms = {self.block_ms} must stay below socket_timeout_s = {self.socket_timeout_s}: "
                "else every quiet read looks like a lost connection"
            )
        return self


class GatewaySettings(Section):
    """HTTP in, tokens out."""

    host: str = Field("127.0.0.1", description="anything but loopback needs api_keys")
    port: int = Field(8000, ge=0, le=65535, description="0: a free one")
    published_host: str = Field("", description="in a container: the host's address the port is published on")
    id: str = Field("", description="empty: made from host name and process id")
    api_keys: list[str] = Field(
        default_factory=list, repr=False, description="keys of /v1; empty: none asked, loopback only"
    )
    admin_keys: list[str] = Field(
        default_factory=list, repr=False, description="keys of /admin; empty: loopback only"
    )
    max_queue: int = Field(256, ge=1, description="requests accepted and not yet running; more get a 503")
    max_inflight: int = Field(2048, ge=1, description="accepted and not yet ended; more get a 503")
    max_body_bytes: int = Field(4 * 1024 * 1024, ge=1024, description="a larger body gets a 413")
    max_connections: int = Field(4096, ge=1, description="open at once; beyond that silent ones are closed")
    header_timeout_s: float = Field(10.0, gt=0, description="a connection that sends no request is closed")
    max_n_tokens: int = Field(
        131072, ge=1, description="limit of n (or prompts) times max_tokens in one call"
    )
    default_max_tokens: int = Field(
        16, ge=1, description="of /v1/completions, as OpenAI's; chat fills the context"
    )
    rate_limit_rpm: int = Field(
        0, ge=0, description="requests per minute per key, 0: no limit; more get a 429"
    )
    rate_limit_concurrent: int = Field(0, ge=0, description="requests at once per key, 0: no limit")
    queue_timeout_s: float = Field(60.0, gt=0, description="longest wait before the first step; then a 504")
    keepalive_s: float = Field(
        10.0, gt=0, description="comment line on a stream that has been silent this long"
    )
    stream_buffer_tokens: int = Field(
        4096, ge=16, description="unread tokens a slow reader may pile up, then an error"
    )
    max_attempts: int = Field(4, ge=1, description="times a request is submitted before it is given up")
    replay: bool = Field(True, description="go on elsewhere after a worker's death; off: one error event")
    drain_timeout_s: float = Field(30.0, ge=0, description="time for streams to end after SIGTERM")
    metrics_compat: Literal["", "vllm"] = Field(
        "", description='"vllm" adds the vllm: names that routers read'
    )

    @property
    def loopback_only(self) -> bool:
        """Whether nobody outside this machine can connect, so that keys may be missing. In a container
        `host` is 0.0.0.0 and the runtime decides: `published_host` then says where."""
        return is_loopback(self.published_host or self.host)


class MonitorSettings(Section):
    """Telemetry in, smoothed metrics out."""

    interval_s: float = Field(0.5, gt=0, description="how often metrics are published while there is load")
    idle_interval_s: float = Field(2.0, gt=0, description="the same while nothing runs")
    window_s: float = Field(10.0, gt=0, description="over which rates and percentiles are taken")
    smoothing: float = Field(0.5, gt=0, le=1, description="weight of the newest value in the running average")
    stale_s: float = Field(5.0, gt=0, description="older telemetry is not used")


class ControllerSettings(Section):
    """Watches leases; decides morphs."""

    interval_s: float = Field(1.0, gt=0, description="how often leases are looked at")
    grace_s: float = Field(2.0, ge=0, description="after Redis came back, before a missing lease means death")
    placement: Literal["least-loaded", "packing", "hybrid"] = Field(
        "hybrid", description="which workers a deployment gets; hybrid packs those below the threshold"
    )
    placement_threshold: float = Field(
        0.3, gt=0, le=1, description="share of load_window_s that a worker may be busy, to get another model"
    )
    load_window_s: float = Field(
        120.0, gt=0, description="over which load is looked at; so long idle, and a worker counts as free"
    )
    change_cooldown_s: float = Field(
        120.0, gt=0, description="before what serves is deployed otherwise; doubles with each try that failed"
    )


class WorkerSettings(Section):
    """One per device."""

    id: str = Field("", description="empty: made from host name and index")
    models: list[str] = Field(
        default_factory=list, description="model folders; `name=dir` sets the served name"
    )
    may_be_empty: bool = Field(
        False, description="start without a model, and wait for those that are deployed"
    )
    device: str = Field("", description='"cpu", "cuda:0", ...; empty: a GPU if there is one')
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on a CPU"
    )
    load_format: Literal["safetensors", "dummy"] = Field("safetensors", description="dummy: random weights")
    memory_mb: int = Field(0, ge=0, description="page budget; 0: 2048 on a CPU, 90 % of free memory on a GPU")
    page_kib: int = Field(0, ge=0, description="0: 64 on a CPU device, 2048 on CUDA")
    block_tokens: int = Field(16, ge=1, description="tokens of a KV block")
    max_model_len: int = Field(0, ge=0, description="0: what the model's config says")
    max_num_seqs: int = Field(64, ge=1, description="sequences in one step")
    max_num_batched_tokens: int = Field(512, ge=1, description="tokens in one step: the chunk of a prefill")
    max_tp: int = Field(
        4, ge=1, le=8, description="largest tensor-parallel degree the weights are padded for"
    )
    variants: list[str] = Field(
        list(QUANTIZED), description="what layers may be swapped to; empty: they stay as they are"
    )
    quantization: Literal["", "awq", "gptq", "rtn"] = Field(
        "", description="method of the variants; empty: the best made for the model, else rounded at load"
    )
    layer_order: Literal["", "profile", "front-to-back", "back-to-front", "random"] = Field(
        "", description="in which layers lose bits; empty: the model's profile, without one front-to-back"
    )
    morph_share: float = Field(
        0.04, gt=0, le=1, description="of a busy engine's time that morphs may take; more makes them faster"
    )
    layers_per_step: int = Field(
        1, ge=1, description="layers that change their tensor-parallel degree between two steps"
    )
    group_host: str = Field(
        "127.0.0.1", description="where members of its groups and pipelines reach it; empty: it joins none"
    )
    group_timeout_s: float = Field(
        20.0, gt=0, description="a member of a group or pipeline that is silent this long is lost"
    )
    host_dir: str = Field(
        "/dev/shm", description="memory for all variants of all layers, one copy for the workers of a host"
    )
    threads: int = Field(0, ge=0, description="CPU threads of the kernels; 0: all cores")
    spin: bool = Field(
        False, description="CPU threads wait for each other awake: faster where nothing else wants the cores"
    )
    lease_s: float = Field(3.0, gt=0.3, description="a worker silent this long is dead")
    telemetry_s: float = Field(0.25, gt=0, description="report interval while there is work")
    idle_telemetry_s: float = Field(1.0, gt=0, description="report interval while nothing runs")
    watchdog_s: float = Field(60.0, gt=0, description="a step longer than this ends the process")
    drain_timeout_s: float = Field(30.0, ge=0, description="time for requests to finish after SIGTERM")

    @field_validator("variants")
    @classmethod
    def _variants_exist(cls, value: list[str]) -> list[str]:
        if unknown := [name for name in value if name not in QUANTIZED]:
            raise ValueError(f"{unknown[0]!r} is no variant; there are {', '.join(QUANTIZED)}")
        return value


class SloSettings(Section):
    """What requests should be served within; for those who watch, nothing is decided by it."""

    ttft_s: float = Field(2.0, gt=0, description="from a request's arrival to its first token")
    tpot_s: float = Field(0.1, gt=0, description="from token to token after it, on the average of a request")


class TracingSettings(Section):
    """OpenTelemetry traces of requests: docs/tracing.md."""

    endpoint: str = Field(
        "", description="OTLP over HTTP, http://host:4318; empty: off. Needs pip install 'instar[otel]'"
    )
    sample: float = Field(
        1.0, ge=0, le=1, description="share of requests; who calls with a traceparent decides"
    )
    service_name: str = Field("instar", min_length=1, description="under which the traces are found")

    @field_validator("endpoint")
    @classmethod
    def _is_a_url(cls, value: str) -> str:
        parts = urlsplit(value)
        if value and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError(f"{value!r} is no address like http://127.0.0.1:4318")
        return value

    @property
    def url(self) -> str:
        """Where spans go. A path of one's own is kept."""
        return (
            self.endpoint
            if urlsplit(self.endpoint).path.strip("/")
            else f"{self.endpoint.rstrip('/')}/v1/traces"
        )


class ServeSettings(Section):
    """`instar serve`: the processes of one machine."""

    workers: int = Field(1, ge=1, le=64, description="worker processes")
    restart_backoff_s: float = Field(
        0.5, gt=0, description="first pause before a died process starts again; doubles"
    )
    restart_backoff_max_s: float = Field(30.0, gt=0, description="longest pause")
    stop_timeout_s: float = Field(15.0, gt=0, description="after that a process that will not end is killed")


class LogSettings(Section):
    """What the processes write to stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    json_lines: bool = Field(False, description="one JSON object a line instead of text")


class Settings(Section):
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
    """Defaults < file < INSTAR_* variables < flags. Raises SettingsError with every problem of the first
    layer that has one: the origin, the key, the value, what would be accepted."""
    return merge(Settings, layers_of(path, os.environ if environ is None else environ, flags))


def layers_of(path: Path | None, environ: Mapping[str, str], flags: Layer | None = None) -> list[Layer]:
    """What each source gave, before the values are judged. Raises SettingsError for unknown names."""
    file = config_file(path, environ)
    return [
        read_file(file, Settings) if file else {},
        read_environment(environ, Settings, SHORT_NAMES),
        flags or {},
    ]


def settings_environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` in which a child process finds exactly these settings: no file and no variable of ours."""
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
    """True for localhost and for addresses of the loopback network; a name or "" (every address) is not."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

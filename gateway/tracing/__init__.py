"""OpenTelemetry traces, one per call. Without `tracing.endpoint` none of its packages is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus.settings import SettingsError, TracingSettings

if TYPE_CHECKING:
    from gateway.delivery.cluster import Cluster
    from gateway.morphs import Morphs
    from gateway.tracing.tracer import Tracer


def tracer_of(settings: TracingSettings, gateway_id: str, morphs: Morphs, cluster: Cluster) -> Tracer | None:
    """Return the tracer; None if traces are off. Raises SettingsError if a package is missing."""
    if not settings.endpoint:
        return None
    try:
        from gateway.tracing.tracer import Tracer
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"tracing.endpoint = {settings.endpoint!r} needs OpenTelemetry ({error.name} is missing): "
            "pip install 'instar[otel]', or leave it empty"
        ) from error
    return Tracer(settings, gateway_id, morphs, cluster)

"""Whether a client traces. Without that OpenTelemetry is not even imported, and nobody asks twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raftlog._client.options import ConsumerOptions, ProducerOptions
from raftlog.errors import InvalidConfig

if TYPE_CHECKING:
    from raftlog._tracing import ConsumerTracing, ProducerTracing


def producer_tracing(options: ProducerOptions) -> ProducerTracing | None:
    """Return what makes a producer's spans, None with `tracing=False`.

    Raises:
        InvalidConfig: OpenTelemetry is not installed.
    """
    if not options.tracing:
        return None
    try:
        from raftlog._tracing import ProducerTracing
    except ModuleNotFoundError as error:
        raise _not_installed(error) from None
    return ProducerTracing(options.client_id)


def consumer_tracing(options: ConsumerOptions) -> ConsumerTracing | None:
    """Return what makes a consumer's spans, None with `tracing=False`.

    Raises:
        InvalidConfig: OpenTelemetry is not installed.
    """
    if not options.tracing:
        return None
    try:
        from raftlog._tracing import ConsumerTracing
    except ModuleNotFoundError as error:
        raise _not_installed(error) from None
    return ConsumerTracing(options.client_id, options.group_id)


def _not_installed(error: ModuleNotFoundError) -> Exception:
    if not (error.name or "").startswith("opentelemetry"):
        return error
    return InvalidConfig(
        f"tracing=true: OpenTelemetry is not installed ({error}); install it with pip install 'raftlog[otel]', or "
        "leave tracing out"
    )

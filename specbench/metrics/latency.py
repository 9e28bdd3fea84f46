"""Every figure that comes from the times of requests: what a client would have measured.

Latencies are of completed requests: one that failed or was cancelled stopped at an arbitrary token.
Its tokens still count towards throughput.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from specbench.metrics.summary import Distribution
from specbench.records import RequestRecord, Serving


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """What a request must meet to count as good; `None` is no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None


def is_completed(request: RequestRecord) -> bool:
    """Say whether a request ran to its own end."""
    return request.finish_reason not in ("error", "cancelled")


def token_chunks(request: RequestRecord) -> list[tuple[float, int]]:
    """Return (time, tokens) of the chunks that hold a token; servers also send empty ones."""
    chunks = zip(request.chunk_times, request.chunk_sizes, strict=True)
    return [(time, size) for time, size in chunks if size > 0]


def time_to_first_token(request: RequestRecord) -> float | None:
    """Return first chunk that holds a token - arrival."""
    chunks = token_chunks(request)
    return chunks[0][0] - request.arrival if chunks else None


def inter_token_latencies(request: RequestRecord) -> list[float]:
    """Return the gaps between consecutive chunks that hold tokens."""
    return [later - earlier for (earlier, _), (later, _) in pairwise(token_chunks(request))]


def time_per_output_token(request: RequestRecord) -> float | None:
    """Return (last chunk - first chunk) / (output tokens - tokens of the first chunk); None for one chunk."""
    chunks = token_chunks(request)
    if len(chunks) < 2:
        return None
    return (chunks[-1][0] - chunks[0][0]) / sum(size for _, size in chunks[1:])


def end_to_end(request: RequestRecord) -> float | None:
    """Return last chunk that holds a token - arrival."""
    chunks = token_chunks(request)
    return chunks[-1][0] - request.arrival if chunks else None


def end_to_end_per_token(request: RequestRecord) -> float | None:
    """Return end-to-end latency / output tokens, comparable where lengths differ."""
    latency = end_to_end(request)
    return None if latency is None else latency / sum(size for _, size in token_chunks(request))


def tokens_per_chunk(requests: Iterable[RequestRecord]) -> float | None:
    """Return output tokens / chunks that hold tokens."""
    sizes = [size for request in requests for _, size in token_chunks(request)]
    return sum(sizes) / len(sizes) if sizes else None


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """Summarise the values that were measured; percentiles interpolate linearly between order statistics."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    return Distribution(
        mean=sum(known) / len(known), p50=_quantile(known, 0.5), p95=_quantile(known, 0.95), num=len(known)
    )


def output_throughput(servings: Iterable[Serving]) -> float | None:
    """Return output tokens / (last finish - first arrival), over the sums of the servings, in tokens/s."""
    tokens, seconds = 0, 0.0
    for serving in servings:
        tokens += sum(len(request.output_tokens) for request in serving.requests)
        seconds += _span(serving)
    return tokens / seconds if seconds > 0 else None


def goodput(servings: Iterable[Serving], level: ServiceLevel) -> float | None:
    """Return completed requests that meet the service level / (last finish - first arrival), per second."""
    good, seconds = 0, 0.0
    for serving in servings:
        good += sum(meets(request, level) for request in serving.requests)
        seconds += _span(serving)
    return good / seconds if seconds > 0 else None


def meets(request: RequestRecord, level: ServiceLevel) -> bool:
    """Say whether a request completed within the limits; a single chunk has no TPOT to exceed."""
    ttft, tpot = time_to_first_token(request), time_per_output_token(request)
    if not is_completed(request) or ttft is None:
        return False
    in_time = level.ttft_s is None or ttft <= level.ttft_s
    return in_time and (level.tpot_s is None or tpot is None or tpot <= level.tpot_s)


def _span(serving: Serving) -> float:
    if not serving.requests:
        return 0.0
    first = min(request.arrival for request in serving.requests)
    return max(request.finished for request in serving.requests) - first


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])

"""``/metrics`` as Prometheus reads it. Names begin with ``spec_engine_`` or ``kvcanary_``; no label names a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvcanary import site_name
from spec_engine.engine import Engine
from spec_engine.server.worker import EngineWorker

if TYPE_CHECKING:
    from kvcanary import HookClock

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
CANARY_COUNTERS = {
    "forwards": "Forwards that the canary watched.",
    "slots_checked": "Entries that a forward read and whose identity was judged.",
    "slots_sealed": "Entries that a forward wrote and that were sealed.",
    "bytes_checked": "Bytes of K and V that were read again and compared.",
    "freed_unread_bytes": "Committed bytes whose pages were freed without a last re-read.",
    "only_counted": "Violations that were too many to be kept.",
    "untold_incidents": "Faults that were too many in one step to be described.",
}
CANARY_GAUGES = {
    "live_bytes": "Committed bytes that are watched now.",
    "peak_live_bytes": "The most committed bytes that were watched at a time.",
    "max_unread_steps": "Longest time, in steps, that a committed byte went without a re-read.",
}


class Timings:
    """What the asyncio side measures: seconds to the first token, and of whole requests."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.first_token = self._histogram("time_to_first_token", "From a request's arrival to its first token.")
        self.request = self._histogram("request", "From a request's arrival to its last token.")

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(f"spec_engine_{name}_seconds", about, buckets=SECONDS, registry=self.registry)


async def exposition(
    worker: EngineWorker,
    timings: Timings,
    clock: HookClock | None,
    model_name: str,
    others: Callable[[], Iterable[Metric]] = tuple,
) -> bytes:
    """All metrics as text; ``others``: what is asked in the engine's thread besides."""
    families = await worker.call(
        lambda engine: [*_engine(engine, worker), *_of_target(engine, worker, clock, model_name), *others()]
    )
    registry = CollectorRegistry()
    registry.register(_Fixed(families))
    return generate_latest(registry) + generate_latest(timings.registry)


class _Fixed:
    """A collector of families that are there already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def _engine(engine: Engine, worker: EngineWorker) -> Iterator[Metric]:
    metrics = engine.metrics
    yield _counter("spec_engine_steps", "Steps of the engine.", metrics.num_steps)
    yield _counter("spec_engine_prefill_tokens", "Prompt tokens that were forwarded.", metrics.prefill_tokens)
    yield _counter("spec_engine_restored_tokens", "Tokens that came back from the host.", metrics.restored_tokens)
    if engine.split is not None:
        swapped = {"in": engine.split.num_swapped_in, "out": engine.split.num_swapped_out}
        yield _counters("spec_engine_swapped_pages", "Pages that a split pool copied.", "direction", swapped)
    yield _counter("spec_engine_emitted_tokens", "Tokens that decode steps emitted.", metrics.tokens_emitted)
    yield _counter(
        "spec_engine_verify_forwards", "Target forwards past the prefill, one a request.", metrics.verify_forwards
    )
    yield _gauge("spec_engine_accepted_length", "Tokens a verify forward, bonus included.", metrics.accepted_length)
    yield _counter(
        "spec_engine_retractions", "Times that a request gave up its pages and resumed.", metrics.num_retractions
    )
    seconds = {"prefill": metrics.prefill_seconds, "decode": metrics.decode_seconds}
    yield _counters("spec_engine_step_seconds", "Wall time of steps.", "kind", seconds)
    yield _counters("spec_engine_requests_ended", "Sequences by finish reason.", "reason", worker.ended)
    yield _gauge("spec_engine_requests_running", "Sequences that have a row.", len(engine.running))
    yield _gauge("spec_engine_requests_waiting", "Sequences that wait for a row.", len(engine.scheduler.waiting))
    pages = engine.memory.cache.accounting(engine.running)
    states = {name: getattr(pages, name) for name in ("free", "quarantined", "owned", "evictable", "protected")}
    yield _gauges("spec_engine_pages", "Pages by where they are; they add up to the pool.", "state", states)
    yield _gauges("spec_engine_pool_bytes", "K and V.", "pool", engine.sizes.pool_bytes)


def _of_target(engine: Engine, worker: EngineWorker, clock: HookClock | None, model_name: str) -> Iterator[Metric]:
    """The canary's, each sample with the labels of machine and device, by which it joins with what DCGM says."""
    target = {"model_name": model_name, "rank": "0"}
    if engine.canary is not None:
        from kvcanary import hardware_of, labels_of

        target |= labels_of(hardware_of(engine.device))
    drills = _counters(
        "kvcanary_drills", "Bits that were flipped to see whether they are found.", "result", worker.drills
    )
    for family in (*_canary(engine, clock), drills):
        family.samples = [sample._replace(labels=sample.labels | target) for sample in family.samples]
        yield family


def _canary(engine: Engine, clock: HookClock | None) -> Iterator[Metric]:
    config = engine.config.canary
    mode = GaugeMetricFamily(
        "kvcanary_mode", "What a finding does, and when bytes are read.", labels=["mode", "content"]
    )
    canary = engine.canary
    is_watched = canary is not None  # it may have no turn
    mode.add_metric([config.mode if is_watched else "off", config.content if is_watched else "off"], 1)
    yield mode
    if canary is None:
        return
    certificate = canary.certificate()
    for name, about in CANARY_COUNTERS.items():
        yield _counter(f"kvcanary_{name}", about, certificate[name])
    for name, about in CANARY_GAUGES.items():
        yield _gauge(f"kvcanary_{name}", about, certificate[name])
    yield _gauge("kvcanary_state_bytes", "Device memory of records and fingerprints.", canary.num_bytes)
    yield _counters("kvcanary_unchecked", "What was not judged.", "reason", certificate["unchecked"])
    yield _counters("kvcanary_fired", "Entries at which a check fired.", "code", certificate["fired"])
    found = CounterMetricFamily("kvcanary_findings", "Findings.", labels=["code", "site"])
    for finding in certificate["findings"]:
        found.add_metric([finding["code"], site_name(*finding["site"])], finding["count"])
    yield found
    yield _incidents(certificate)
    yield _counter("kvcanary_bit_errors", "Incidents of one changed word that nobody wrote.", certificate["bit_errors"])
    yield _info(certificate)
    if clock is not None:
        yield _counter("kvcanary_hook_seconds", "Host time inside the canary's hooks.", clock.seconds)
        rest = engine.metrics.prefill_seconds + engine.metrics.decode_seconds - clock.seconds
        ratio = clock.seconds / rest if rest > 0 else 0.0
        yield _gauge("kvcanary_overhead_ratio", "Host time inside the canary's hooks, over the rest of steps.", ratio)


def _incidents(certificate: Mapping[str, Any]) -> Metric:
    """Each fault once, by the family of its likeliest cause, and the mode that says what is done about it."""
    family = CounterMetricFamily("kvcanary_incidents", "Faults, each once.", labels=["family", "action"])
    for name, count in certificate["families"].items():
        family.add_metric([name, certificate["mode"]], count)
    return family


def _info(certificate: Mapping[str, Any]) -> Metric:
    labels = {name: certificate[name] for name in ("version", "mode", "content", "seed_id")}
    labels |= {"adapter": "spec_engine", "host_version": certificate["version"]}
    info = GaugeMetricFamily("kvcanary_info", "1; what watches, in its labels.", labels=list(labels))
    info.add_metric(list(labels.values()), 1)
    return info


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(name, about, value=value)


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(name, about, value=value)


def _counters(name: str, about: str, label: str, values: Mapping[str, Any]) -> Metric:
    family = CounterMetricFamily(name, about, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _gauges(name: str, about: str, label: str, values: Mapping[str, Any]) -> Metric:
    family = GaugeMetricFamily(name, about, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family

"""Alert rules of Prometheus, and what starts it beside Grafana."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple


class Alert(NamedTuple):
    """expr: PromQL;  wait: how long it holds;  severity: `page` or `warn`;  summary: with its labels;  what: to do"""

    name: str
    expr: str
    wait: str
    severity: str
    summary: str
    what: str


BY = "instance"
ALERTS = (
    Alert(
        "KVCanaryFinding",
        f"sum by ({BY}) (increase(kvcanary_incidents_total[10m])) > 0",
        "0m",
        "page",
        "{{ $labels.instance }} has found damage in its KV cache",
        "kvcanary explain on its dump; kvcanary fleet blame for who it is",
    ),
    Alert(
        "KVCanaryBitErrorsOnOneGPU",
        "sum by (UUID, hostname) (increase(kvcanary_bit_errors_total[7d])) >= 2",
        "0m",
        "page",
        "{{ $labels.UUID }} of {{ $labels.hostname }} had two bit errors in 7 days",
        "drain it, then kvcanary probe on it",
    ),
    Alert(
        "KVCanaryNotRunning",
        f"sum by ({BY}) (increase(spec_engine_emitted_tokens_total[5m])) > 0 unless "
        f"sum by ({BY}) (increase(kvcanary_slots_checked_total[5m])) > 0",
        "5m",
        "page",
        "{{ $labels.instance }} emits tokens and checks nothing",
        "its canary is off, has no turn, or has stopped: look at its log for kvcanary.stopped and kvcanary.turn",
    ),
    Alert(
        "KVCanaryStopped",
        "kvcanary_watching == 0",
        "1m",
        "page",
        "a canary on {{ $labels.instance }} has stopped",
        "restart the worker to watch it again, and report the kvcanary.stopped event",
    ),
    Alert(
        "KVCanaryUnchecked",
        f"sum by ({BY}) (rate(kvcanary_unchecked_total[1h])) > "
        f"0.05 * sum by ({BY}) (rate(kvcanary_slots_checked_total[1h]))",
        "10m",
        "warn",
        "{{ $labels.instance }} does not judge more than 5 % of what it reads",
        "kvcanary_unchecked_total has the reasons",
    ),
    Alert(
        "KVCanaryDrillFailed",
        'increase(kvcanary_drills_total{result!="found"}[1h]) > 0',
        "0m",
        "page",
        "a drill on {{ $labels.instance }} ended as {{ $labels.result }}",
        "its canary sees nothing: restart it, and drill again",
    ),
    Alert(
        "KVCanaryMemberUnreachable",
        'up{job="kvcanary"} == 0',
        "5m",
        "warn",
        "{{ $labels.instance }} cannot be scraped",
        "kvcanary fleet names the reason",
    ),
)
#: Metrics that only engines with an adapter expose: a server of our engine has none of them.
OF_ADAPTERS = frozenset({"kvcanary_watching"})
PROMETHEUS = """global:
  scrape_interval: 15s
rule_files:
  - alerts.yml
scrape_configs:
  - job_name: kvcanary
    static_configs:
      - targets: [{targets}]
"""
SOURCES = """apiVersion: 1
datasources:
  - name: Prometheus
    type: prometheus
    access: proxy
    url: http://prometheus:9090
    isDefault: true
"""
PROVIDERS = """apiVersion: 1
providers:
  - name: kvcanary
    type: file
    options:
      path: /var/lib/grafana/dashboards
"""
COMPOSE = """services:
  prometheus:
    image: prom/prometheus:v3.7.3
    volumes:
      - ./prometheus.yml:/etc/prometheus/prometheus.yml:ro
      - ./alerts.yml:/etc/prometheus/alerts.yml:ro
    ports: ["9090:9090"]
    extra_hosts: ["host.docker.internal:host-gateway"]
  grafana:
    image: grafana/grafana:12.2.1
    volumes:
      - ./grafana/datasources.yml:/etc/grafana/provisioning/datasources/kvcanary.yml:ro
      - ./grafana/providers.yml:/etc/grafana/provisioning/dashboards/kvcanary.yml:ro
      - ./grafana/dashboards:/var/lib/grafana/dashboards:ro
    ports: ["3000:3000"]
    depends_on: [prometheus]
"""


def rules() -> str:
    """`alerts.yml`."""
    return "\n".join(["groups:", "  - name: kvcanary", "    rules:", *_lines()]) + "\n"


def _lines() -> Iterator[str]:
    for alert in ALERTS:
        yield f"      - alert: {alert.name}"
        yield f"        expr: {json.dumps(alert.expr)}"
        yield f"        for: {alert.wait}"
        yield f"        labels: {{severity: {alert.severity}}}"
        yield f"        annotations: {{summary: {json.dumps(alert.summary)}, description: {json.dumps(alert.what)}}}"

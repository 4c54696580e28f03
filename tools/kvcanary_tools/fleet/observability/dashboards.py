"""Two dashboards: of one engine, and of a fleet. A panel is a title, a unit and its queries; the layout follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA_VERSION = 39  # of Grafana 10 and later
ENGINE = '{instance=~"$instance", model_name=~"$model_name"}'
ALL = '{job=~"$job"}'
WIDTH, HEIGHT, COLUMNS = 12, 8, 2


@dataclass(frozen=True)
class Panel:
    """queries: by legend an expression of PromQL;  kind: `timeseries`, `stat` or `table`"""

    title: str
    about: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"


ENGINE_PANELS = (
    Panel("Findings", "kvcanary_findings_total by code and site in the last hour",
          {"{{code}} {{site}}": f"sum by (code, site) (increase(kvcanary_findings_total{ENGINE}[1h]))"}),
    Panel("Incidents by cause", "kvcanary_incidents_total by the family ranked first",
          {"{{family}}": f"sum by (family) (increase(kvcanary_incidents_total{ENGINE}[1h]))"}),
    Panel("Slots checked", "kvcanary_slots_checked_total a second",
          {"slots": f"sum(rate(kvcanary_slots_checked_total{ENGINE}[5m]))"}, "ops"),
    Panel("Bytes read again", "kvcanary_bytes_checked_total a second",
          {"bytes": f"sum(rate(kvcanary_bytes_checked_total{ENGINE}[5m]))"}, "Bps"),
    Panel("Not judged", "kvcanary_unchecked_total by reason",
          {"{{reason}}": f"sum by (reason) (increase(kvcanary_unchecked_total{ENGINE}[1h]))"}),
    Panel("Longest unread", "kvcanary_max_unread_steps: steps that a committed byte went without a re-read",
          {"steps": f"max(kvcanary_max_unread_steps{ENGINE})"}),
    Panel("Host time of the canary", "kvcanary_overhead_ratio: inside its hooks, over the rest of steps",
          {"ratio": f"max(kvcanary_overhead_ratio{ENGINE})"}, "percentunit"),
    Panel("Memory of the canary", "kvcanary_state_bytes: records and fingerprints on the device",
          {"bytes": f"sum(kvcanary_state_bytes{ENGINE})"}, "bytes"),
    Panel("Tokens", "spec_engine_emitted_tokens_total a second",
          {"tokens": 'sum(rate(spec_engine_emitted_tokens_total{instance=~"$instance"}[5m]))'}),
    Panel("Requests", "spec_engine_requests_running and spec_engine_requests_waiting",
          {"running": 'sum(spec_engine_requests_running{instance=~"$instance"})',
           "waiting": 'sum(spec_engine_requests_waiting{instance=~"$instance"})'}),
)  # fmt: skip
FLEET_PANELS = (
    Panel("Unreachable", "up == 0: members that Prometheus cannot scrape",
          {"members": f"count(up{ALL} == 0) or vector(0)"},
          kind="stat"),
    Panel("Watched", "kvcanary_info: members with a canary", {"members": f"count(kvcanary_info{ALL})"}, kind="stat"),
    Panel("Bit errors by GPU", "kvcanary_bit_errors_total of 7 days: twice on one UUID means drain and probe",
          {"{{UUID}} {{hostname}}":
           f"topk(10, sum by (UUID, hostname) (increase(kvcanary_bit_errors_total{ALL}[7d])) > 0)"},
          kind="table"),
    Panel("Code paths", "kvcanary_findings_total of a day by code and site",
          {"{{code}} {{site}}": f"topk(10, sum by (code, site) (increase(kvcanary_findings_total{ALL}[1d])) > 0)"},
          kind="table"),
    Panel("Versions and modes", "kvcanary_info: what watches, and what a finding does",
          {"{{version}} {{mode}} {{content}}": f"count by (version, mode, content) (kvcanary_info{ALL})"},
          kind="table"),
    Panel("Incidents by cause", "kvcanary_incidents_total of a day",
          {"{{family}}": f"sum by (family) (increase(kvcanary_incidents_total{ALL}[1d]))"}),
    Panel("Exposure", "kvcanary_bytes_checked_total a second: what rates are divided by",
          {"bytes": f"sum(rate(kvcanary_bytes_checked_total{ALL}[5m]))"}, "Bps"),
    Panel("Longest unread, worst member", "kvcanary_max_unread_steps",
          {"{{instance}}": f"topk(5, kvcanary_max_unread_steps{ALL})"}),
    Panel("Drills", "kvcanary_drills_total of a day by result",
          {"{{result}}": f"sum by (result) (increase(kvcanary_drills_total{ALL}[1d]))"}),
    Panel("Not judged, share", "kvcanary_unchecked_total over kvcanary_slots_checked_total, worst members",
          {"{{instance}}": f"topk(5, sum by (instance) (rate(kvcanary_unchecked_total{ALL}[1h])) / "
                           f"sum by (instance) (rate(kvcanary_slots_checked_total{ALL}[1h])))"}, "percentunit"),
)  # fmt: skip


def engine_dashboard() -> dict[str, Any]:
    """One engine: findings, coverage, cost."""
    variables = [
        _variable("instance", "kvcanary_info", "instance"),
        _variable("model_name", "kvcanary_info", "model_name"),
    ]
    return _dashboard("kvcanary-engine", "kvcanary: an engine", variables, ENGINE_PANELS)


def fleet_dashboard() -> dict[str, Any]:
    """All engines: who is watched, and which GPU, code path and version stands out."""
    return _dashboard("kvcanary-fleet", "kvcanary: a fleet", [_variable("job", "kvcanary_info", "job")], FLEET_PANELS)


def _dashboard(uid: str, title: str, variables: list[dict[str, Any]], panels: Sequence[Panel]) -> dict[str, Any]:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    return {
        "uid": uid,
        "title": title,
        "tags": ["kvcanary"],
        "schemaVersion": SCHEMA_VERSION,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source, *variables]},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _variable(name: str, metric: str, label: str) -> dict[str, Any]:
    query = f"label_values({metric}, {label})"
    return {
        "name": name, "type": "query", "datasource": SOURCE, "query": query, "refresh": 2, "multi": True,
        "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    instant = panel.kind == "table"
    targets = [
        {
            "refId": chr(ord("A") + place),
            "datasource": SOURCE,
            "expr": query,
            "legendFormat": legend,
            "instant": instant,
        }
        | ({"format": "table"} if instant else {})
        for place, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }

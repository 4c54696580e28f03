"""The files of `kvcanary observability DIR`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kvcanary_tools.fleet.observability.alerts import COMPOSE, PROMETHEUS, PROVIDERS, SOURCES, rules
from kvcanary_tools.fleet.observability.dashboards import engine_dashboard, fleet_dashboard


def files(targets: Sequence[str]) -> dict[str, str]:
    """By path their text. `targets`: `host:port` of the servers that are scraped."""
    dashboards = {"engine": engine_dashboard(), "fleet": fleet_dashboard()}
    shown = {f"grafana/dashboards/{name}.json": json.dumps(own, indent=2) + "\n" for name, own in dashboards.items()}
    return {
        "alerts.yml": rules(),
        "prometheus.yml": PROMETHEUS.format(targets=", ".join(map(json.dumps, targets))),
        "docker-compose.yml": COMPOSE,
        "grafana/datasources.yml": SOURCES,
        "grafana/providers.yml": PROVIDERS,
        **shown,
    }


def write(folder: Path, targets: Sequence[str]) -> list[Path]:
    """Write them all. OSError where one cannot be written."""
    written = []
    for name, text in files(targets).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written

"""`kvcanary observability`: files that load, over metrics that servers expose; a real Prometheus takes them."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from kvcanary_tools.cli import main
from kvcanary_tools.fleet.observability.alerts import ALERTS, OF_ADAPTERS
from kvcanary_tools.fleet.observability.dashboards import ENGINE_PANELS, FLEET_PANELS
from spec_engine.server.labels import TARGET

from .conftest import KEY, Running, wait_for

EXPRESSIONS = [query for panel in (*ENGINE_PANELS, *FLEET_PANELS) for query in panel.queries.values()]
EXPRESSIONS += [alert.expr for alert in ALERTS]
PROMETHEUS = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs prometheus and promtool, as Debian's package prometheus has them",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the command writes."""
    result = CliRunner().invoke(main, ["observability", str(tmp_path / "own"), "--target", "127.0.0.1:8000"])
    assert result.exit_code == 0
    assert [Path(line).exists() for line in result.stdout.splitlines()] == [True] * 7
    return tmp_path / "own"


@pytest.fixture
def served(start) -> Running:
    """A server that has answered and been asked."""
    server = start("log")
    body = {"model": "toy", "prompt": list(range(5, 25)), "max_tokens": 8, "temperature": 0}
    assert server.post("/v1/completions", body, key=KEY).status_code == 200
    return server


def test_files_load_and_panels_have_what_grafana_needs(folder: Path) -> None:
    """Dashboards as JSON with unique panels on a grid, each with a query and a description; the rest as YAML."""
    for name in ("engine", "fleet"):
        board = json.loads((folder / f"grafana/dashboards/{name}.json").read_text())
        assert board["uid"] == f"kvcanary-{name}"
        panels = board["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels) == 10
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
        assert len(set(places)) == len(places)
        assert all(panel["description"] and panel["targets"] for panel in panels)
        used = set(re.findall(r"\$(\w+)", json.dumps([panel["targets"] for panel in panels])))
        assert used <= {one["name"] for one in board["templating"]["list"]}
    rules = yaml.safe_load((folder / "alerts.yml").read_text())["groups"][0]["rules"]
    assert [rule["expr"] for rule in rules] == [alert.expr for alert in ALERTS]
    compose = yaml.safe_load((folder / "docker-compose.yml").read_text())
    mounted = [volume.split(":")[0] for service in compose["services"].values() for volume in service["volumes"]]
    assert all((folder / path).exists() for path in mounted)
    targets = yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"]
    assert targets == [{"targets": ["127.0.0.1:8000"]}]


def test_every_metric_is_exposed_by_a_running_server(served: Running) -> None:
    """No panel and no rule asks for a name that nobody has; labels by which they group are there too."""
    families = list(text_string_to_metric_families(served.get("/metrics").text))
    exposed = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    asked = {name for text in EXPRESSIONS for name in re.findall(r"\b(?:kvcanary|spec_engine)_\w+", text)}
    assert asked - exposed == OF_ADAPTERS
    labels = {label for family in families for sample in family.samples for label in sample.labels} | TARGET
    labels |= {"instance", "job", "site", "code", "family", "result", "reason"}
    grouped = {name for text in EXPRESSIONS for own in re.findall(r"by \(([^)]*)\)", text) for name in own.split(", ")}
    assert grouped <= labels


def test_every_sample_of_the_canary_says_where(served: Running) -> None:
    """Model, rank and machine, and what is known of a GPU: so it joins with what DCGM exports."""
    families = text_string_to_metric_families(served.get("/metrics").text)
    own = [sample for family in families for sample in family.samples if family.name.startswith("kvcanary_")]
    assert len(own) > 10
    where = {"model_name": "toy", "rank": "0", "hostname": platform.node()}
    assert all(where.items() <= sample.labels.items() for sample in own)


@PROMETHEUS
def test_a_real_prometheus_scrapes_alerts_and_answers_every_panel(
    served: Running, folder: Path, tmp_path: Path
) -> None:
    """promtool accepts rules and configuration; a bit error fires its alert; no query of a panel is an error."""
    config = (folder / "prometheus.yml").read_text().replace("127.0.0.1:8000", urlsplit(served.url).netloc)
    (folder / "prometheus.yml").write_text(config.replace("15s", "1s\n  evaluation_interval: 1s"))
    for kind, name in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        checked = subprocess.run(["promtool", "check", kind, str(folder / name)], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr
    port = _free_port()
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}",
               f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        root = f"http://127.0.0.1:{port}/api/v1"
        wait_for(lambda: _asked(root, "kvcanary_info"), 60)
        for text in EXPRESSIONS:
            assert _asked(root, re.sub(r'"\$\w+"', '".*"', text)) is not None, text
        drilled = CliRunner().invoke(main, ["fleet", "--prometheus", f"http://127.0.0.1:{port}", "--api-key", "x"])
        assert urlsplit(served.url).netloc in drilled.stdout
        served.server.worker.drills["silent"] += 1
        time.sleep(2.5)
        served.server.worker.drills["silent"] += 1
        wait_for(lambda: "KVCanaryDrillFailed" in httpx.get(f"{root}/alerts").text, 60)
    finally:
        child.kill()
        child.wait()


def _asked(root: str, expression: str) -> list | None:
    """Samples; None where the expression is refused."""
    try:
        told = httpx.get(f"{root}/query", params={"query": expression}).json()
    except httpx.TransportError:
        return None
    return told["data"]["result"] if told["status"] == "success" else None


def _free_port() -> int:
    import socket

    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return own.getsockname()[1]

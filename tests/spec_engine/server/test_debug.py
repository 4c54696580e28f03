"""/debug/kvcanary: who may look, what is shown, and faults that are armed in a running server."""

from __future__ import annotations

import base64

import pytest

from kvcanary import faults
from kvcanary.invariants import InvariantError
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.errors import ConfigError
from spec_engine.server.inspection import drawing
from spec_engine.server.inspection.drafts import DraftWatch
from spec_engine.server.options import ServerOptions

from .conftest import KEY, wait_for
from .test_corruption import Client, flip_bit, strike

EVIL = "<img src=x onerror=alert(1)>"
PAGES = "/debug/kvcanary/pages"


@pytest.fixture(scope="module")
def watched(toy_model):
    from .conftest import Starter

    starter = Starter(str(toy_model))
    yield starter("abort", allow_faults=True)
    starter.stop()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": f"Bearer {KEY}"}, 200),
        ({"Authorization": "Basic " + base64.b64encode(f"any:{KEY}".encode()).decode()}, 200),
        ({"Authorization": "Basic !"}, 401),
        ({"Authorization": f"Bearer {KEY}", "Host": "evil.example"}, 403),
        ({"Authorization": f"Bearer {KEY}", "Host": "localhost"}, 200),
        ({"Authorization": f"Bearer {KEY}", "Origin": "http://evil.example"}, 403),
        ({"Authorization": f"Bearer {KEY}", "Origin": "null"}, 403),
    ],
)
def test_who_may_look(watched, headers: dict, status: int) -> None:
    """Key, Host and Origin must all be right; a browser may show the key as a password."""
    for path in (PAGES, "/debug/kvcanary", "/debug/kvcanary/state", "/debug/kvcanary/report"):
        answer = watched.get(path, key=None, headers=headers)
        assert answer.status_code == status
        assert answer.headers.get("www-authenticate") == ('Basic realm="kvcanary"' if status == 401 else None)


def test_reading_is_get_only(watched) -> None:
    """Nothing else is there to be asked for."""
    for path in (PAGES, "/debug/kvcanary/findings"):
        assert watched.ask("POST", path).status_code == 405


def test_what_is_shown(start) -> None:
    """Page map, requests, certificate, findings and the tree of a request that ended; no token, no text."""
    server = start("abort", debug=True)
    _, name = strike(server)
    pages = server.get(PAGES).json()
    columns = [pages[column] for column in ("state", "owner", "references", "generation", "checked")]
    assert {len(column) for column in columns} == {server.engine.sizes.num_pages + 1}
    assert "SHARED" in {pages["states"][state] for state in pages["state"]}
    assert max(pages["checked"]) > 0
    finding = server.get("/debug/kvcanary/findings").json()[0]
    assert (finding["code"], finding["readers"]) == ("R9", [name])
    assert "(kv_memory.py:" in finding["history"][0]
    state = server.get("/debug/kvcanary/state").json()
    assert {(reported["code"], *reported["readers"]) for reported in state["findings"]} == {("R9", name)}
    assert state["certificate"]["mode"] == "abort"
    assert state["requests"] == []
    tree = server.get(f"/debug/kvcanary/requests/{name}/tree").json()
    root = tree["nodes"][0]
    assert (root["parent"], root["depth"], root["accepted"]) == (-1, 0, True)
    assert len(tree["nodes"]) == server.engine.config.num_draft_tokens
    assert server.get("/debug/kvcanary/requests/nobody/tree").status_code == 404
    assert server.post("/debug/kvcanary/faults", {"name": "x"}).status_code == 404


def test_nodes_have_the_slots_that_verify_stores_them_in(toy_model) -> None:
    """By them the page tells which node of a tree a finding is about."""
    engine = Engine(EngineConfig(model=str(toy_model), dtype="float64", max_total_tokens=2048, topk=2))
    watch, stored = DraftWatch(engine.drafter), []
    verify_forward = engine.runner.verify_forward

    def heard(batch, tree):
        forward = verify_forward(batch, tree)
        lens, slots = batch.lens, forward.slots.view(len(batch), -1).tolist()
        depths = (forward.positions.view(len(batch), -1) - batch.lens_tensor[:, None]).tolist()
        for name, length, own, depth in zip(batch.ids, lens, slots, depths, strict=True):
            stored.append((name, length, list(zip(own, depth, strict=True))))
        return forward

    engine.runner.verify_forward = heard
    for length in (5, 19):
        engine.submit(list(range(3, 3 + length)), SamplingParams(max_new_tokens=12, ignore_eos=True))
    while engine.has_work:
        engine.step()
        for name, length, nodes in stored[-2:]:
            tree = watch.tree_of(engine, name)
            assert (tree["committed_len"], [(one["slot"], one["depth"]) for one in tree["nodes"]]) == (length, nodes)
    assert len({slot for *_, nodes in stored for slot, _ in nodes}) > 12


def test_running_requests_are_shown_with_their_pages(watched) -> None:
    """Lengths and pages of what runs, owners in the map."""
    with watched.held(steps=3):
        client = Client(watched, [9] * 20, max_tokens=60)
        [request] = wait_for(
            lambda: [one for one in watched.get("/debug/kvcanary/requests").json() if one["state"] == "running"]
        )
        pages = watched.get(PAGES).json()
    client.join()
    assert (request["prompt_len"], request["max_new_tokens"]) == (20, 60)
    assert pages["owners"].index(request["request_id"]) in pages["owner"]


def test_the_page_needs_nothing_from_elsewhere(watched) -> None:
    """One page of HTML, its script and style allowed by nonce alone, no address but its own."""
    answer = watched.get("/debug/kvcanary")
    policy = answer.headers["content-security-policy"]
    nonce = policy.partition("'nonce-")[2].partition("'")[0]
    assert answer.text.count(f'nonce="{nonce}"') == 2
    assert "width=device-width" in answer.text
    assert "prefers-color-scheme: dark" in answer.text
    assert policy.startswith("default-src 'none'")
    assert answer.headers["cache-control"] == "no-store"
    assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in answer.text


def test_the_report_shows_each_incident(start) -> None:
    """Both sides, the page's history and a command that this server answers; nothing where nothing was found."""
    server = start("abort", debug=True)
    assert server.get("/debug/kvcanary/report").text.strip() == ""
    _, name = strike(server)
    page = server.get("/debug/kvcanary/report").text
    assert page.count("<article") == 1
    assert f"kvcanary explain {server.url} --finding 1</code>" in page
    assert f"granted to &#39;{name}&#39;" in page
    assert page.count('class="differs"') == 2
    assert 'id="code-R9"' in page
    [verdict, *_] = server.get("/debug/kvcanary/state").json()["sentences"]
    assert verdict[0] == "bad"


def test_names_in_the_report_are_text(start) -> None:
    """Whatever an engine calls a request, a pool or a place: the template writes it as text."""
    server = start("abort", debug=True)
    strike(server)
    [finding] = server.get("/debug/kvcanary/incidents").json()
    evil = {name: EVIL if isinstance(value, str) else value for name, value in finding.items()}
    evil |= {"code": "R9", "evidence": [EVIL], "history": [f"granted to '{EVIL}' at step 1"], "expected": {EVIL: EVIL}}
    evil["causes"] = [{"text": EVIL, "basis": EVIL, "evidence": [EVIL], "family": "bits"}]
    drawn = drawing.incidents([evil], EVIL)
    page = drawing.templates().get_template("report.html").render(drawn, prefix=EVIL, has_dump=True)
    assert EVIL not in page
    assert page.count("&lt;img") > 10


def test_a_map_without_a_canary(start) -> None:
    """The allocator's pages, in the same columns."""
    server = start("off", debug=True)
    server.post("/v1/completions", {"model": "toy", "prompt": [5] * 20})
    state = server.get("/debug/kvcanary/state").json()
    assert state["certificate"] is None
    assert state["pages"]["states"] == ["FREE", "HELD"]
    assert sum(state["pages"]["state"]) == sum(count > 0 for count in state["pages"]["references"]) > 4


def test_faults_need_the_key_as_a_bearer_token(watched) -> None:
    """What a browser adds by itself arms nothing; unknown names are refused with the list's place."""
    basic = {"Authorization": "Basic " + base64.b64encode(f"any:{KEY}".encode()).decode()}
    refused = watched.post("/debug/kvcanary/faults", {"name": "lengths.worst_case_estimate"}, key=None, headers=basic)
    assert refused.status_code == 403
    unknown = watched.post("/debug/kvcanary/faults", {"name": "no.such"})
    assert unknown.status_code == 400
    assert "kvcanary faults lists them all" in unknown.json()["error"]["message"]
    not_armed = watched.post("/debug/kvcanary/faults", {"name": "lengths.worst_case_estimate", "armed": False})
    assert "is not armed, armed are: none" in not_armed.json()["error"]["message"]


def test_a_fault_is_armed_and_disarmed(watched) -> None:
    """It changes values while it is armed, and is gone with the server at the latest."""
    name = "lengths.worst_case_estimate"
    reported = watched.post("/debug/kvcanary/faults", {"name": name}).json()
    assert reported == {"armed": [{"name": name, "num_strikes": 0}], "waiting": [], "struck": []}
    watched.post("/v1/completions", {"model": "toy", "prompt": [5] * 20})
    [armed] = watched.get("/debug/kvcanary/faults").json()["armed"]
    assert armed["num_strikes"] > 0
    assert watched.post("/debug/kvcanary/faults", {"name": name, "armed": False}).json()["armed"] == []
    assert not faults._armed


class Target:
    """As much of a target as the fault below needs."""

    def __init__(self, engine) -> None:
        self.engine = engine


def test_a_fault_in_the_state_strikes_once(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a step in which it can be made; without a canary it is refused."""
    from kvcanary.faults import catalogue
    from kvcanary.faults.fault import Fault

    def strike(target: Target) -> bool:
        return flip_bit(target.engine, 9) is not None

    fault = Fault("bits.test", "A bit.", "R9", "always", strike=strike)
    monkeypatch.setattr(catalogue, "find", lambda name: fault)
    server = start("abort", allow_faults=True, target_of=Target)
    reported = server.post("/debug/kvcanary/faults", {"name": "bits.test"}).json()
    assert reported == {"armed": [], "waiting": ["bits.test"], "struck": []}
    client = Client(server, [9] * 20)
    client.join(30)
    assert client.reason == "kv_corruption"
    reported = server.get("/debug/kvcanary/faults").json()
    assert reported == {"armed": [], "waiting": [], "struck": ["bits.test"]}
    blind = start("off", allow_faults=True, target_of=Target)
    refused = blind.post("/debug/kvcanary/faults", {"name": "bits.test"})
    assert refused.status_code == 400
    assert "takes a canary to be seen" in refused.json()["error"]["message"]


def test_a_broken_rule_stops_the_server(start) -> None:
    """A published bug that ends in a typed error ends the server with it, and its streams with a reason."""
    server = start("abort", allow_faults=True, attention_backend="paged")
    server.post("/debug/kvcanary/faults", {"name": "bounds.page_table_scatter"})
    client = Client(server, [5] * 20)
    client.join(30)
    server.thread.join(30)
    assert client.reason == "server_error"
    assert isinstance(server.failure, InvariantError)
    assert not faults._armed


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"allow_faults": True, "api_key": "x", "host": "0.0.0.0"}, "allow_faults needs a loopback address"),
        ({"debug": True}, "the debug pages need an api_key"),
        ({"port": 65536}, "port must lie in"),
        ({"max_waiting": -1}, "max_waiting must be at least 0"),
        ({"grace_seconds": float("nan")}, "grace_seconds must be finite"),
        ({"api_key": ""}, "api_key must not be empty"),
    ],
)
def test_options_that_are_refused(settings: dict, words: str) -> None:
    """Each with a sentence that has the value and the rule."""
    with pytest.raises(ConfigError, match=words):
        ServerOptions(**settings)

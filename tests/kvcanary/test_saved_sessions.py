"""A saved session: K and V of a quantised pool and their scales go to a file, and another engine takes them up.

kekzl/imp#1189: the file had K and V and not their scales, so that blocks were decoded with whatever scales lay there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvcanary import (
    CanaryConfig,
    CanaryManager,
    ForeignSnapshotError,
    KVCorruptionError,
    PoolView,
    ReadPlan,
    Seal,
    Tier,
    WritePlan,
)

PAGE, LAYERS = 4, 2
TOKENS = list(range(50, 58))  # two whole pages
Session = dict[str, list[torch.Tensor]]


class Engine:
    """A pool of int8 with a float32 scale a head; what a forward gives depends on every byte it reads."""

    def __init__(self, seed: int, fills_v_scale: bool = True) -> None:
        self.fills_v_scale = fills_v_scale
        self.k, self.v = ([torch.zeros(40, 2, 8, dtype=torch.int8) for _ in range(LAYERS)] for _ in range(2))
        self.ks, self.vs = ([torch.zeros(40, 2) for _ in range(LAYERS)] for _ in range(2))
        view = PoolView("t", self.k, self.v, PAGE, extras={"k_scale": self.ks, "v_scale": self.vs})
        self.manager = CanaryManager(CanaryConfig(content="full", seed=seed), [view])
        self.manager.arm()

    def forward(self, name: str, length: int, tokens: list[int], pages: list[int], kind: str) -> float:
        manager, row = self.manager, slots_of(pages)[: length + len(tokens)]
        manager.begin_step(manager.step + 1)
        substep = manager.substep(kind, 0, "t")
        written = row[length:]
        write = WritePlan(written, torch.tensor(tokens), torch.arange(length, length + len(tokens)))
        read = ReadPlan(torch.tensor([0, len(row)]), row, (name,), 1, torch.tensor([length]), len(tokens))
        substep.open(read, write)
        for layer in range(LAYERS):
            x = torch.sin(torch.tensor(tokens).float() + layer)[:, None, None].expand(-1, 2, 8)
            scale = x.abs().amax(-1) / 127 + 0.001 * torch.tensor(tokens)[:, None]
            v_scale = scale * (2 if self.fills_v_scale else 0)
            q = (x / scale[:, :, None]).round().to(torch.int8)
            substep.store(layer, q, q.flip(-1), scale, v_scale)
            for tensor, value in zip(self.of_layer(layer), (q, q.flip(-1), scale, v_scale), strict=True):
                tensor[written] = value
        substep.close()
        manager.commit(name, len(row))
        manager.check()
        return float(sum((k[row].float() * s[row][:, :, None]).sum() for k, s in zip(self.k, self.ks, strict=True)))

    def of_layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.k[layer], self.v[layer], self.ks[layer], self.vs[layer]

    def held(self, pages: list[int], with_scales: bool) -> Session:
        """What the file gets of these pages."""
        names = ("k", "v", "ks", "vs") if with_scales else ("k", "v")
        return {name: [tensor[slots_of(pages)].clone() for tensor in getattr(self, name)] for name in names}


def slots_of(pages: list[int]) -> torch.Tensor:
    return torch.tensor([page * PAGE + offset for page in pages for offset in range(PAGE)])


def save(folder: Path, seed: int, with_scales: bool) -> None:
    """One process: a prefill, then the file and its seal."""
    engine = Engine(seed)
    engine.manager.admit("one", TOKENS)
    engine.manager.on_alloc("one", [1, 2])
    engine.forward("one", 0, TOKENS, [1, 2], "prefill")
    torch.save(engine.held([1, 2], with_scales), folder / "session")
    (folder / "seal").write_bytes(engine.manager.on_offload([1, 2]).to_bytes())


def take_up(folder: Path, seed: int) -> float:
    """Another process: the file comes into other pages, and a request goes on behind it."""
    return go_on(Engine(seed), torch.load(folder / "session"), Seal.from_bytes((folder / "seal").read_bytes()))


def go_on(engine: Engine, session: Session, seal: Seal | None) -> float:
    manager, pages = engine.manager, [4, 5]
    manager.begin_step(manager.step + 1)
    manager.admit("two", [*TOKENS, 99])
    manager.on_alloc("two", pages, for_load=True)
    manager.on_load_begin("two", pages)
    for name, layers in session.items():
        for tensor, kept in zip(getattr(engine, name), layers, strict=False):
            tensor[slots_of(pages)] = kept
    manager.on_load_end("two", pages, len(TOKENS), seal)
    manager.commit("two", len(TOKENS))
    manager.check()
    manager.on_alloc("two", [6])
    return engine.forward("two", len(TOKENS), [99], [4, 5, 6], "decode")


def test_a_session_without_its_scales_is_found(tmp_path: Path) -> None:
    """T1, before a forward reads them: what is missing is another part of the row."""
    save(tmp_path, 5, with_scales=False)
    with pytest.raises(KVCorruptionError) as caught:
        take_up(tmp_path, 5)
    [finding] = caught.value.findings
    assert (finding.code, finding.found["slots_wrong"]) == ("T1", "8 of 8")


def test_a_whole_session_is_right(tmp_path: Path) -> None:
    """The answer is the one that it would have been."""
    save(tmp_path, 5, with_scales=True)
    engine = Engine(5)
    engine.manager.admit("all", TOKENS)
    engine.manager.on_alloc("all", [1, 2])
    engine.forward("all", 0, TOKENS, [1, 2], "prefill")
    engine.manager.append("all", [99])
    engine.manager.on_alloc("all", [3])
    assert take_up(tmp_path, 5) == engine.forward("all", len(TOKENS), [99], [1, 2, 3], "decode")


def held(engine: Engine, with_scales: bool = True) -> Session:
    """What a prefill of the prompt leaves in two pages."""
    engine.manager.admit("one", TOKENS)
    engine.manager.on_alloc("one", [4, 5])
    engine.forward("one", 0, TOKENS, [4, 5], "prefill")
    return engine.held([4, 5], with_scales)


def used(seed: int) -> Engine:
    """Its pages had another request, and hold poison since."""
    engine = Engine(seed)
    held(engine)
    engine.manager.release("one")
    engine.manager.on_free("one", [4, 5])
    for _ in range(8):
        engine.manager.begin_step(engine.manager.step + 1)
        engine.manager.check()
    return engine


LACKING = {"k_scale and v_scale": ("ks", "vs"), "v_scale": ("vs",), "V": ("v",)}


@pytest.mark.parametrize("start", [Engine, used])
@pytest.mark.parametrize("missing", LACKING)
def test_without_a_seal_a_part_that_did_not_arrive_is_found(missing: str, start: Callable[[int], Engine]) -> None:
    """Nothing is known of the bytes, but zeros and poison where other parts have come are nobody's."""
    session = {name: layers for name, layers in held(Engine(5)).items() if name not in LACKING[missing]}
    with pytest.raises(KVCorruptionError) as caught:
        go_on(start(6), session, None)
    finding = caught.value.findings[0]
    assert (finding.code, finding.found["verdict"], finding.found["missing"]) == ("T1", "short", missing)
    assert finding.found["pages_wrong"] == "2 of 2"
    assert f"{missing} did not arrive" in finding.causes[0].text
    assert "exchanged" not in str(finding.bytes_of)  # two scales of zeros would be the same exchanged


@pytest.mark.parametrize("start", [Engine, used])
def test_without_a_seal_a_layer_that_did_not_arrive_is_found(start: Callable[[int], Engine]) -> None:
    """The layers behind those that were copied hold zeros or poison."""
    session = {name: layers[:1] for name, layers in held(Engine(5)).items()}
    with pytest.raises(KVCorruptionError) as caught:
        go_on(start(6), session, None)
    finding = caught.value.findings[0]
    assert (finding.code, finding.layers) == ("T1", (1,))
    assert "K and V of 1 of 2 layers did not arrive" in finding.causes[0].text


def test_an_extra_that_is_never_filled_is_no_finding() -> None:
    """Nor does it hide one: what forwards fill must arrive."""
    engine = Engine(5, fills_v_scale=False)
    engine.manager.admit("other", TOKENS)
    engine.manager.on_alloc("other", [1, 2])
    engine.forward("other", 0, TOKENS, [1, 2], "prefill")
    session = held(Engine(5, fills_v_scale=False))
    go_on(engine, session, None)
    engine.manager.release("two")
    engine.manager.on_free("two", [4, 5, 6])
    with pytest.raises(KVCorruptionError) as caught:
        go_on(again(engine), {name: session[name] for name in ("k", "v")}, None)
    [finding] = caught.value.findings
    assert (finding.code, finding.found["missing"]) == ("T1", "k_scale")


def again(engine: Engine) -> Engine:
    """Its freed pages can be granted."""
    for tensor in (*engine.ks, *engine.vs):
        tensor[slots_of([4, 5])] = 0
    return engine


@pytest.mark.parametrize("start", [Engine, used])
def test_without_a_seal_a_whole_session_is_right(start: Callable[[int], Engine]) -> None:
    """Also where some layers have no use for an extra, and its values are zeros there."""
    session = held(Engine(5))
    assert go_on(start(6), session, None) == go_on(Engine(6), session, None)
    session["ks"][0].zero_()
    go_on(start(6), session, None)


@pytest.mark.parametrize("with_scales", [True, False])
def test_a_session_of_another_seed_is_refused(tmp_path: Path, with_scales: bool) -> None:
    """Right bytes are no T1 for that, and wrong ones are not let in: the error has both names."""
    save(tmp_path, 5, with_scales)
    with pytest.raises(ForeignSnapshotError, match=f"{Tier(5).seed_id} for {Tier(6).seed_id}"):
        take_up(tmp_path, 6)


@pytest.mark.parametrize("with_scales", [True, False])
def test_a_tier_without_a_manager_finds_it_too(tmp_path: Path, with_scales: bool) -> None:
    """Whoever writes the file puts what it should hold, and checks what came into the pool."""
    engine = Engine(5)
    engine.manager.admit("one", TOKENS)
    engine.manager.on_alloc("one", [1, 2])
    engine.forward("one", 0, TOKENS, [1, 2], "prefill")
    seal = Tier(5).put("session", engine.held([1, 2], True)).to_bytes()
    torch.save(engine.held([1, 2], with_scales), tmp_path / "session")
    other = Engine(9)
    for name, layers in torch.load(tmp_path / "session").items():
        for tensor, kept in zip(getattr(other, name), layers, strict=True):
            tensor[slots_of([4, 5])] = kept
    tier = Tier(5, mode="log")
    assert tier.check("session", other.held([4, 5], True), seal) == with_scales
    if not with_scales:
        [finding] = tier.findings
        assert (finding.part, finding.found["verdict"]) == (None, "short")
        assert "of ks of layer 0" in finding.causes[0].text

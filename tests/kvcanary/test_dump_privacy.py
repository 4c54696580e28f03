"""What a dump keeps back unless it was asked for: token ids, salts, the seed, and bytes of K and V."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary.dumps.pseudonyms import TokenPseudonyms
from kvcanary.dumps.reading import Dump, read_dump
from kvcanary.dumps.writing import salt_of
from kvcanary.replay.replayer import replay
from kvcanary_kernels.record.layout import chain_host, chain_root, make_keys, mix_host, unsigned
from kvcanary_tools.bench.toy.engine import ToyEngine

SEED = 0x1B0C_5EED_0000_1234
SALT = "tenant-4711-secret"
PROMPT = [70001 + 13 * n for n in range(40)]


@pytest.fixture(autouse=True)
def _inference() -> object:
    with torch.inference_mode():
        yield


def found(path: Path, **settings: object) -> tuple[ToyEngine, Dump]:
    """A run with a secret prompt, a salt and a seed, and the dump of its finding."""
    engine = ToyEngine(CanaryConfig(content="full", seed=SEED, dump_dir=str(path), **settings))
    engine.canary.admit("salted", PROMPT, salt=SALT)
    engine.canary.admit("chatty", PROMPT[:5], salt="another")
    engine.start("only", PROMPT)
    for _ in range(3):
        engine.draft("only")
    slot = int(engine.rows["only"].slots[7])
    engine.pools["target"].kv.view(torch.int32)[1, slot, 1, 0, 2] ^= 1 << 9
    with pytest.raises(KVCorruptionError) as caught:
        engine.draft("only")
    return engine, read_dump(caught.value.report.dump)


def members(dump: Dump) -> dict[str, bytes]:
    with zipfile.ZipFile(dump.path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def spellings(numbers: list[int]) -> list[bytes]:
    """These numbers one after another, as arrays and as text."""
    texts = [", ".join(map(str, numbers)), ",".join(map(str, numbers))]
    return [struct.pack(f"<{len(numbers)}{size}", *numbers) for size in "iq"] + [text.encode() for text in texts]


def test_no_token_salt_or_seed_leaves(tmp_path):
    """Nowhere in the file, packed or not, are three of the prompt's ids in a row, the salt or the seed."""
    _, dump = found(tmp_path)
    parts = {**members(dump), "whole file": dump.path.read_bytes()}
    needles = [text for start in range(len(PROMPT) - 2) for text in spellings(PROMPT[start : start + 3])]
    needles += [SALT.encode(), b"another", str(SEED).encode(), f"{SEED:x}".encode(), struct.pack("<Q", SEED)]
    for name, data in parts.items():
        assert [needle for needle in needles if needle in data] == [], name
    assert dump.manifest["seed"] != SEED
    assert "seed_id" not in dump.manifest["certificate"]
    assert sorted(path for path in parts if path.startswith("content")) == []


def test_ids_are_drawn_anew_for_every_dump(tmp_path):
    """Two dumps of one run have different ids for the same tokens, equal ones where tokens are equal."""
    engine, dump = found(tmp_path)
    other = read_dump(engine.canary.dump(tmp_path / "second.kvdump"))
    first, second = (next(r for r in d.now if r["request_id"] == "salted")["tokens"] for d in (dump, other))
    assert not np.array_equal(first, second)
    assert len(set(first.tolist())) == len(set(PROMPT))
    only = next(r for r in dump.now if r["request_id"] == "only")["tokens"]
    assert np.array_equal(only[: len(PROMPT)], first)


def test_chains_of_the_engine_s_keys_read_nothing_back(tmp_path):
    """With the engine's seed, every 64-bit number of the dump and every token id, no entry gives its token away.

    The same attack on the engine's own records reads all of them: it is the relabelling that stops it.
    """
    engine, dump = found(tmp_path)
    keys = make_keys(SEED, 1, 1)
    tokens = np.unique(np.array(engine.rows["only"].tokens))

    def read_back(chains: set[int]) -> int:
        """How many tokens of the row follow from chain values: some value continues another by a token of its place."""
        known, count = {chain_root(keys, "target")}, 0
        for position in range(20):
            mixed = [mix_host(int(token), position, keys) for token in tokens]
            ahead = {(keys.multiplier * value + own) % 2**64 for value in known for own in mixed}
            if not ahead & chains:
                break
            known, count = ahead & chains, count + 1
        return count

    plain = {
        unsigned(value) for value in engine.canary.recorder.manager_state.state.by_name["target"].records[:, 1].tolist()
    }
    assert read_back(plain) == 20
    reported = {
        unsigned(int(v)) for array in dump.arrays.values() if array.dtype == np.int64 for v in array.ravel().tolist()
    }
    assert read_back(reported) == 0


def test_chains_of_the_dump_s_keys_are_those_of_its_ids(tmp_path):
    """Under the dump's own keys the records' chains continue each other: replay compares what the engine compared."""
    _, dump = found(tmp_path)
    keys = make_keys(dump.manifest["seed"], 1, 1)
    request = next(r for r in dump.now if r["request_id"] == "only")
    root = chain_root(keys, "target", salt_of(request["root"]))
    expected = chain_host(request["tokens"][:12].tolist(), 0, root, keys)
    slots = (request["pages"][:, None] * dump.manifest["page_size"] + np.arange(dump.manifest["page_size"])).ravel()[
        :12
    ]
    assert [unsigned(value) for value in dump.arrays["now.records"][slots, 1].tolist()] == expected


def test_sides_of_a_finding_keep_values_back(tmp_path):
    """The bits and the value of the changed word are bytes of K or V: the dump says that they are withheld."""
    _, dump = found(tmp_path)
    [finding] = dump.findings
    assert finding["expected"] == finding["found"] == {"bits": "withheld", "value": "withheld"}
    assert finding["bit"] == 9


def test_all_of_it_leaves_when_asked_for(tmp_path):
    """With `dump_content` ids are as they are, and the bytes of the slots found are there, before nothing else."""
    from safetensors.torch import load

    engine, dump = found(tmp_path, dump_content=True)
    assert dump.manifest["tokens"] == "as they are"
    assert next(r for r in dump.now if r["request_id"] == "salted")["tokens"].tolist() == PROMPT
    content = load(members(dump)["content.safetensors"])
    [slot] = content["target.slots"].tolist()
    words = engine.pools["target"].kv.view(torch.int32)[:, slot].reshape(2, -1)
    assert torch.equal(content["target.words"][:, 0], words)
    assert replay(dump).missing == []
    texts = {**members(dump)}
    assert not any(SALT.encode() in data or str(SEED).encode() in data for data in texts.values())


def test_codes_keep_to_their_side_of_a_vocabulary():
    """An id that is no token stays none, and stand-ins of tokens are tokens: W6 judges them as it did."""
    struct = TokenPseudonyms([3, 99, 100, 5000, -1], [100, 2000])
    inside, edge, beyond, outside, negative = struct.of([3, 99, 100, 5000, -1]).tolist()
    assert {inside, edge} <= set(range(100))
    assert inside != edge
    assert 100 <= beyond < 2000
    assert outside >= 2000
    assert negative == -1

"""Many streaming clients, faults at random: who is corrupted ends with the reason, all others are served as ever."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from spec_engine import Engine, SamplingParams
from spec_engine.models.embedded import load_excerpts

from .conftest import Running, Starter, wait_for
from .test_corruption import Client


class Gremlin(threading.Thread):
    """Flips one bit of K or V of a running request, again and again; ``struck`` are the prompts that it hit.

    prey: prompts that it may hit, so that however slow a machine is some are served to the end
    """

    def __init__(self, server: Running, prey: list[list[int]], seconds: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.server, self.prey, self.seconds, self.random = server, prey, seconds, random.Random(seed)
        self.struck: set[tuple[int, ...]] = set()
        self.is_over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.is_over.wait(self.seconds * self.random.uniform(0.5, 1.5)):
            self.server.between_steps(self._strike, 600)

    def _strike(self, engine: Engine) -> None:
        """In an entry that nobody else holds: what several rows read would end them all, as it should."""
        own = {request.request_id: request.num_shared * engine.sizes.page_size for request in engine.running}
        prey = [one for one in engine.running if list(one.prompt_ids) in self.prey and one.output_ids]
        ripe = [one for one in prey if one.committed_len > own[one.request_id] + 1]
        if not ripe:
            return
        request = self.random.choice(ripe)
        place = self.random.randrange(own[request.request_id], request.committed_len)
        slot = int(engine.request_table.table[request.row, place])
        rows = engine.pools["target"].kv[self.random.randrange(engine.pools["target"].kv.shape[0]), slot]
        word = rows[self.random.randrange(2), 0].view(torch.uint8)
        word[self.random.randrange(len(word))] ^= 1 << self.random.randrange(8)
        self.struck.add(tuple(request.prompt_ids))


def storm(
    server: Running, prompts: list[list[int]], prey: list[list[int]], max_tokens: int, seconds: float, seed: int = 0
) -> tuple[int, int]:
    """Each prompt is streamed by a client of its own; how many ended corrupted, and how many well.

    Prompts must begin differently, so that no two share a page.
    """
    params = SamplingParams(max_new_tokens=max_tokens, ignore_eos=True)
    outputs = server.between_steps(lambda engine: engine.generate(prompts, params), 600)
    texts = [output.text for output in outputs]  # before any fault
    num_corrupted = num_right = 0
    gremlin = Gremlin(server, prey, seconds, seed)
    clients = [Client(server, prompt, max_tokens) for prompt in prompts]
    for client in clients:
        client.join(600)
    gremlin.is_over.set()
    gremlin.join(60)
    for prompt, text, client in zip(prompts, texts, clients, strict=True):
        is_struck = tuple(prompt) in gremlin.struck
        if client.reason == "kv_corruption":
            assert is_struck
            assert text.startswith(client.text)
            num_corrupted += 1
        else:
            assert (client.reason, client.text) == ("length", text)
            assert not is_struck
            num_right += 1
    wait_for(lambda: server.server.worker.num_live == 0)
    assert server.between_steps(lambda engine: engine.memory.num_available) == server.engine.allocator.num_pages
    server.between_steps(lambda engine: engine.memory.cache.check_references([]))
    assert server.failure is None
    return num_corrupted, num_right


def test_eight_clients(start) -> None:
    """Seconds on the toy model."""
    server = start("abort", prefix_cache=False, max_running_requests=4)
    prompts = [[8 * number + place % 8 for place in range(12)] for number in range(8)]
    num_corrupted, num_right = storm(server, prompts, prompts[::2], max_tokens=24, seconds=0.15)
    assert num_corrupted > 0
    assert num_right > 0


@pytest.mark.slow
def test_sixty_four_clients_for_five_minutes(tmp_path) -> None:
    """The embedded model in float64, every byte checked in every forward."""
    starter = Starter("embedded")
    server = starter(
        "abort", model_name="toy", page_size=16, topk=4, num_steps=5, max_total_tokens=65536, max_running_requests=16
    )
    excerpts = load_excerpts()
    heads = [server.engine.tokenizer.encode(f"# {number}\n") for number in range(64)]
    texts = [excerpts[number % len(excerpts)].prompt[-200:] for number in range(64)]
    prompts = [head + server.engine.tokenizer.encode(text) for head, text in zip(heads, texts, strict=True)]
    began, rounds = time.monotonic(), []
    while time.monotonic() < began + 300:
        rounds.append(storm(server, prompts, prompts, max_tokens=96, seconds=2.0, seed=len(rounds)))
    starter.stop()
    num_corrupted, num_right = map(sum, zip(*rounds, strict=True))
    print(f"{num_corrupted} corrupted, {num_right} right in {len(rounds)} rounds")
    assert num_corrupted > 0
    assert num_right > 0

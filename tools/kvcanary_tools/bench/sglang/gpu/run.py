"""``python -m kvcanary_tools.bench.sglang.gpu.run [eagle|tree]``: 64 requests through SGLang 0.5.17 on a GPU.

Its scheduler runs in this process. It is the newest release for torch 2.11. Needed beside torch are sglang 0.5.17 and
sgl-kernel (sglang-kernel 0.4.5, its `common_ops` for the device at hand) with what they import; what is missing of the
rest is stood in for, and the release answers to the names that the plug-in uses of 0.5.23 (`older`). The model has the
shape of Llama-3-8B and random weights, decode steps run in SGLang's graphs, under its overlap schedule. Runs with the
canary and without take turns over the same requests; the record has both speeds, whether the tokens are equal, and what
was checked. Trees of drafts run once more with each fault of `graphs` in SGLang's own graph of draft steps.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kvcanary_tools.bench import common
from kvcanary_tools.bench.common import machine, save
from kvcanary_tools.bench.gpu.device import device
from kvcanary_tools.bench.sglang.gpu import graphs, older

NAME, PAIRS, MOST_TURNS = "gpu_sglang", 4, 20_000
WHAT = "tokens a second inside SGLang with the canary and without, in turns, and what was checked"
COUNTED = ("armed", "forwards", "slots_checked", "bytes_checked", "fired", "unchecked", "bytes")


@dataclass(frozen=True)
class Case:
    """The model's shape, the requests, and SGLang's settings; eagle: drafts of a head, three steps of `topk`."""

    eagle: bool = False
    topk: int = 1
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    inner: int = 14336
    vocab: int = 32000
    requests: int = 64
    prompt: int = 512
    answer: int = 128
    content: str = "rolling"


CASES = {"dense": Case(), "eagle": Case(eagle=True), "tree": Case(eagle=True, topk=4)}


def save_model(case: Case, folder: Path) -> None:
    """Folders of a target and a draft head, without weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": case.vocab,
        "hidden_size": case.hidden,
        "intermediate_size": case.inner,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "head_dim": case.hidden // case.heads,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }
    head = {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    for name, own in (("target", {}), ("draft", head)):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config | own))


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int) -> None:
    """Random weights under which the next token mostly hangs on the last one, as a draft head knows it."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    for name, own in model.named_parameters():
        if "norm" in name:
            own.fill_(1)
        elif name.endswith("fc.weight"):
            size = len(own)
            noise = torch.randn(size, size, generator=generator, device="cuda").to(own.dtype)
            own.zero_()
            own[:, :size] = torch.eye(size, dtype=own.dtype, device="cuda") + noise * 0.01
        elif own.dim() > 1:
            own.normal_(0, 0.02, generator=generator)
            if "o_proj" in name or "down_proj" in name:
                own.mul_(0.05)


def settings(case: Case, folder: Path) -> dict[str, Any]:
    """SGLang's arguments; of names that this release does not have none is passed."""
    room = case.requests * (case.prompt + case.answer + 64) + 4096
    wanted = {
        "model_path": str(folder / "target"),
        "load_format": "dummy",
        "context_length": 2048,
        "max_running_requests": case.requests,
        "page_size": 1,
        "chunked_prefill_size": 8192,
        "mem_fraction_static": 0.7,
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "device": "cuda",
        "random_seed": 0,
        "log_level": "warning",
        "max_total_tokens": room,
        "cuda_graph_max_bs": case.requests,
    }
    if case.eagle:
        wanted |= {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": str(folder / "draft"),
            "speculative_num_steps": 3,
            "speculative_eagle_topk": case.topk,
            "speculative_num_draft_tokens": 4 if case.topk == 1 else 8,
        }
    return wanted


def build(case: Case, folder: Path) -> Any:
    """A scheduler in this process, with its model."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    from kvcanary.adapters.sglang.step_trace import traced_graphs

    older.rename()
    save_model(case, folder)
    known = {own.name for own in fields(ServerArgs)}
    server = ServerArgs(**{name: value for name, value in settings(case, folder).items() if name in known})
    publish(server, role="scheduler")
    with traced_graphs(server):
        scheduler = Scheduler(server, PortArgs.init_new(server), 0, 0, 0, 0, 0, 0, None)
    target = scheduler.tp_worker.model_runner.model
    if case.eagle:
        draft = scheduler.draft_worker.draft_worker.draft_runner.model
        fill(draft, 2)
        draft.set_embed_and_head(*target.get_embed_and_head())
    fill(target, 1)  # behind the head, which shares its embeddings
    return scheduler


class Receiver:
    """What a scheduler asks for requests: all of them at once, and the end when the last one has ended."""

    def __init__(self, scheduler: Any, wanted: list[Any], requests: dict[str, Any]) -> None:
        self._scheduler, self._wanted, self._requests, self.turns = scheduler, wanted, requests, 0
        self._inner = scheduler.request_receiver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def recv_requests(self, *args: Any, **kwargs: Any) -> list[Any]:
        self.turns += 1
        if self.turns > MOST_TURNS:
            raise RuntimeError(f"{MOST_TURNS} turns and requests still run")
        new, self._wanted = self._wanted, []
        over = self._requests and all(own.finished() for own in self._requests.values())
        if over and self._scheduler.running_batch.is_empty():
            self._scheduler.gracefully_exit = True
        return new


def prompts(case: Case) -> list[list[int]]:
    """Of each request its own, the same in every run."""
    span = case.vocab - 8
    return [[3 + (7919 * place + 31 * n * n + n) % span for n in range(case.prompt)] for place in range(case.requests)]


def asked(case: Case) -> list[Any]:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_new_tokens=case.answer, ignore_eos=True)
    params.normalize(None)
    nothing = ("input_text", "input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob")
    more = dict.fromkeys(nothing) | {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0}
    return [
        TokenizedGenerateReqInput(
            rid=f"r{place}", input_ids=array("q", tokens), sampling_params=params, stream=False, **more
        )
        for place, tokens in enumerate(prompts(case))
    ]


def play(scheduler: Any, case: Case) -> tuple[float, dict[str, list[int]]]:
    """Tokens a second, and the tokens, of all requests through the scheduler's own loop."""
    requests: dict[str, Any] = {}
    queue, receiver = scheduler._add_request_to_queue, scheduler.request_receiver

    def queued(request: Any, *args: Any, **kwargs: Any) -> Any:
        requests[request.rid] = request
        return queue(request, *args, **kwargs)

    scheduler._add_request_to_queue = queued
    scheduler.request_receiver = Receiver(scheduler, asked(case), requests)
    scheduler.gracefully_exit = False
    torch.cuda.synchronize()
    begun = time.perf_counter()
    with torch.no_grad():
        scheduler.run_event_loop()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    scheduler._add_request_to_queue, scheduler.request_receiver = queue, receiver
    scheduler.flush_cache()
    outputs = {name: list(request.output_ids) for name, request in requests.items()}
    return sum(map(len, outputs.values())) / seconds, outputs


def attached(scheduler: Any, case: Case) -> Any:
    from kvcanary import CanaryConfig
    from kvcanary.adapters.sglang.scheduler import attach

    canary = attach(scheduler, CanaryConfig(mode="log", content=case.content, seed=3))
    if canary is None:
        raise RuntimeError("the canary has no turn: unset KVCANARY_SHARE")
    return canary


def pair(scheduler: Any, case: Case, is_first: bool) -> dict[str, Any]:
    """One run without a canary, then one with it."""
    bare, expected = play(scheduler, case)
    canary = attached(scheduler, case)
    if is_first:
        play(scheduler, case)  # what is compiled and captured on the way
    held, outputs = play(scheduler, case)
    report, findings = canary.report(), [finding.to_dict() for finding in canary.findings]
    canary.detach()
    return {
        "bare": round(bare, 1),
        "canary": round(held, 1),
        "ratio": round(held / bare, 4),
        "equal_tokens": expected == outputs,
        "pools": {role: {name: own[name] for name in COUNTED} for role, own in report.items()},
        "findings": findings,
    }


def harmed_run(scheduler: Any, case: Case, off: torch.Tensor, fault: str) -> dict[str, Any]:
    """One run with a fault in SGLang's graph of draft steps: its first finding."""
    canary = attached(scheduler, case)
    off[graphs.FAULTS[fault]] = 1
    play(scheduler, case)
    off.zero_()
    told = [finding.to_dict() for finding in canary.findings]
    canary.detach()
    return {"fault": fault, "findings": len(told), "first": told[0] if told else None}


def lines(record: dict[str, Any]) -> list[str]:
    """The table of docs/sglang.md."""
    shown = [
        "| drafts | GPU | tokens a second without, with | ratio: median, fewest, most | tokens equal | findings | "
        "slots checked |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, what in (("dense", "none"), ("eagle", "EAGLE, 3 in a chain"), ("tree", "EAGLE, trees of 4 branches")):
        runs = record[kind]["runs"]
        ratios = [run["ratio"] for run in runs]
        gpu = record[kind]["machine"]["device"].split()[1]
        speeds = [f"{median(run[name] for run in runs):,.0f}" for name in ("bare", "canary")]
        equal = sum(run["equal_tokens"] for run in runs)
        found = sum(len(run["findings"]) for run in runs)
        slots = sum(pool["slots_checked"] for run in runs for pool in run["pools"].values())
        shown.append(
            f"| {what} | {gpu} | {', '.join(speeds)} | {median(ratios):.3f}, {min(ratios):.3f}, {max(ratios):.3f} | "
            f"{equal} of {len(runs)} | {found} | {slots:,} |"
        )
    return shown


def main(arguments: Sequence[str] = ()) -> None:
    kind = arguments[0] if arguments else "dense"
    if kind not in CASES or len(arguments) > 1:
        sys.exit(f"what is measured must be one of {', '.join(CASES)}, got {' '.join(arguments)!r}")
    if not torch.cuda.is_available():
        sys.exit("kvcanary_tools.bench.sglang.gpu.run measures a CUDA device, and there is none here")
    older.install()
    import sglang

    case = CASES[kind]
    is_tree = case.topk > 1
    with tempfile.TemporaryDirectory() as folder, graphs.harmed_steps() if is_tree else nullcontext() as off:
        scheduler = build(case, Path(folder))
        play(scheduler, case)
        runs = [pair(scheduler, case, is_first=number == 0) for number in range(PAIRS)]
        harmed = [harmed_run(scheduler, case, off, fault) for fault in graphs.FAULTS] if is_tree else []
    row = {"case": asdict(case), "machine": machine() | device(), "sglang": sglang.__version__, "runs": runs}
    row |= {"harmed": harmed} if harmed else {}
    print(f"{kind}: ratios {[run['ratio'] for run in runs]}, equal {[run['equal_tokens'] for run in runs]}")
    print(*harmed, sep="\n")
    path = common.RESULTS / f"{NAME}.json"
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"what": WHAT}
    save(NAME, held | {kind: row})
    sys.stdout.flush()
    os._exit(0)  # the scheduler has threads that nobody ends


if __name__ == "__main__":
    main(sys.argv[1:])

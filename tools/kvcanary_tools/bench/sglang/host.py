"""A real SGLang scheduler in one process on a CPU, with tiny random models, driven step by step.

Two of its imports need packages that a CPU has no use for; both are stood in for, for SGLang alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from array import array
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcanary_tools.bench.sglang import host_tier, models, recurrent
from kvcanary_tools.bench.sglang.misreading import read_by_map

ABSENT = ("torchvision", "vllm")  # imported by code that a dense model never calls
VOCAB = 32
DRAFTS = {"EAGLE": "draft", "STANDALONE": "standalone", "NEXTN": "deltas"}  # where their models lie
QUIET = {"log_level": "error", "skip_tokenizer_init": True, "disable_cuda_graph": True, "random_seed": 0}
ON_CPU = {"device": "cpu", "sampling_backend": "pytorch", "grammar_backend": "none", "dtype": "float32"}


class _Nothing(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class Nothing(metaclass=_Nothing):
    """What an absent package holds: it can be named and made, and not called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a package that is not here was called")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Fields of models may have such a type."""
        from pydantic_core import core_schema

        return core_schema.any_schema()


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in ABSENT and self._is_for_sglang():
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda name: _Nothing.__getattr__(Nothing, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: Any) -> None:
        pass

    @staticmethod
    def _is_for_sglang() -> bool:
        """transformers must go on believing that they are absent."""
        frame: Any = sys._getframe(2)
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            if not name.startswith(("importlib", "_frozen", __name__)):
                return bool(name.startswith("sglang"))
            frame = frame.f_back
        return False


class Replayed:
    """What stands for SGLang's graph of a draft's extends: it runs without the runner's own `forward`."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._forward = runner, runner.forward

    def can_run_graph(self, forward_batch: Any) -> bool:
        return True

    def execute(self, forward_batch: Any, select_index: Any) -> Any:
        self._runner.attn_backend.init_forward_metadata(forward_batch)
        output = self._forward(forward_batch).logits_output
        for name in ("next_token_logits", "hidden_states"):
            setattr(output, name, getattr(output, name)[select_index])
        return output


class Host:
    """One scheduler, its requests, and the tokens that they were given."""

    def __init__(
        self,
        folder: Path,
        eagle: bool = False,
        algorithm: str = "EAGLE",
        topk: int = 1,
        steps: int = 3,
        nodes: int = 4,
        layers: int = 2,
        peer: bool = False,
        graphs: bool = False,
        kind: str = "",
        tier: bool = False,
        adaptive: dict[str, Any] | None = None,
        rank: int | None = None,
        ahead: bool = False,
        **settings: Any,
    ):
        """layers: of the target; peer: SGLang's own canary runs beside ours, over all the bytes that it reads
        algorithm: of those that draft;  graphs: a draft's extends run as from SGLang's graph of them
        kind:   of models.py; empty: a Llama;  tier: entries go to host memory and come back
        adaptive: by rows of a batch, how the number of draft steps is adapted, as SGLang's file says it
        rank:   of several processes, which all have the same requests
        ahead:  a step is launched before the tokens of the one before are known, as SGLang does on a GPU
        """
        import torch

        torch.set_num_threads(1)
        if kind in models.INTERPRETED:
            recurrent.stand_in()
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        folder = folder if layers == 2 else folder / f"{layers} layers"
        if not (folder / "target").exists():
            make_models(folder, layers)
        self.peer_said: list[str] = []
        self._results = deque[Any]() if ahead else None  # of batches whose tokens nobody has looked at yet
        self.rank = rank
        if peer:
            settings |= {"kv_canary": "log", "kv_canary_real_data": "all"}
            _let_peer_run(self.peer_said)
        wanted = {
            "model_path": str(folder / "target"), "context_length": 128, "max_total_tokens": 1024,
            "max_running_requests": 4, "page_size": 4, "chunked_prefill_size": 32, "mem_fraction_static": 0.3,
            "attention_backend": "triton" if eagle else "torch_native", **QUIET, **ON_CPU,
            "disable_overlap_schedule": not ahead,
        }  # fmt: skip
        if eagle:
            import sglang.kernels.ops.speculative.cache_locs as cache_locs
            import sglang.kernels.ops.speculative.spec_tree as spec_tree

            spec_tree._is_xpu = cache_locs._is_xpu = True  # its own Triton kernels, which Triton's interpreter runs
            _let_masks_run()
            wanted |= {
                "speculative_algorithm": algorithm, "speculative_num_draft_tokens": nodes,
            }  # fmt: skip
        if eagle and algorithm in DRAFTS:
            wanted |= {
                "speculative_draft_model_path": str(folder / DRAFTS[algorithm]),
                "speculative_num_steps": steps, "speculative_eagle_topk": topk,
            }  # fmt: skip
        if adaptive is not None:
            told = folder / "adaptive.json"
            told.write_text(json.dumps(adaptive), encoding="utf-8")
            wanted |= {"speculative_adaptive": True, "speculative_adaptive_config": str(told)}
        if tier:
            host_tier.stand_in()
            wanted |= host_tier.SETTINGS
        if kind:
            wanted["model_path"] = str(models.make(folder, kind))
        load_plugins()
        server = ServerArgs(**(wanted | settings))
        server.resolve_once()
        publish(server, role="scheduler", ranks=SpawnRanks(world_rank=rank or 0, dp_rank=None, gpu_id=0))
        self.scheduler: Any = Scheduler(server, PortArgs.init_new(server))
        if kind == "windows" and server.attention_backend == "torch_native":
            read_by_map(self.scheduler.tp_worker.model_runner.attn_backend)
        if graphs:
            worker = self.scheduler.draft_worker.draft_worker
            worker.cuda_graph_runner_for_draft_extend = Replayed(worker.draft_runner)
        self.requests: dict[str, Any] = {}
        self.counts: dict[str, int] = {}
        self._count(self.scheduler, "_add_request_to_queue", self._asked)
        self._count(self.scheduler, "run_batch", self._ran)
        self._count(self.scheduler.tree_cache, "evict_for_alloc", self._evicted)
        if getattr(self.scheduler.draft_worker, "adaptive_controller", None) is not None:
            self._drafted = self.scheduler.draft_worker.speculative_num_steps
            self._count(self.scheduler.draft_worker, "apply_runtime_state", self._adapted)

    def _count(self, owner: Any, name: str, told: Callable[..., None]) -> None:
        """Let `told(result, ...)` hear of every call; a canary that is attached later wraps this in turn."""
        method = getattr(owner, name)

        def around(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            told(result, *args, **kwargs)
            return result

        setattr(owner, name, around)

    def _asked(self, result: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        self.requests[request.rid] = request

    def _adapted(self, result: Any, state: Any) -> None:
        self._add("adapted", state.speculative_num_steps != self._drafted)
        self._drafted = state.speculative_num_steps

    def _ran(self, result: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        self._add("steps", 1)
        self._add("chunks", self.scheduler.chunked_req is not None)

    def _evicted(self, result: Any, *args: Any, **kwargs: Any) -> None:
        self._add("evicted", getattr(result, "num_tokens_evicted", 0))

    def _add(self, name: str, more: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + int(more)

    def begin(self) -> dict[str, int]:
        """Forget the requests that were; what is given counts how much each has when a turn begins."""
        self.requests.clear()
        self.peer_said.clear()
        self.counts = {}
        self.given: dict[str, int] = {}
        return self.given

    @property
    def canary(self) -> Any:
        return getattr(self.scheduler, "kvcanary", None)

    def ask(self, name: str, tokens: list[int], count: int, embedding: int | None = None) -> None:
        """embedding: the seed of one that the second token has instead of its own"""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        params = SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)
        params.normalize(None)
        told = TokenizedGenerateReqInput(
            rid=name, input_text=None, input_ids=array("q", tokens), input_embeds=None, mm_inputs=None,
            token_type_ids=None, sampling_params=params, return_logprob=False, logprob_start_len=-1,
            top_logprobs_num=0, token_ids_logprob=None, stream=False,
            **({} if embedding is None else {"positional_embed_overrides": models.embedding(embedding)}),
        )  # fmt: skip
        self.scheduler.process_input_requests([told])

    def step(self) -> bool:
        """One turn of the scheduler's loop; whether there was anything to do."""
        own = self.scheduler
        plan = own.get_next_batch_to_run(running_batch=own.running_batch, last_batch=own.last_batch)
        own.running_batch, batch = plan.running_batch, plan.batch_to_run
        if self._results is not None:
            return self._step_ahead(self._results, batch)
        if batch:
            own.process_batch_result(batch, own.run_batch(batch))
        else:
            own.on_idle()
        own.last_batch = batch
        return batch is not None

    def _step_ahead(self, results: deque[Any], batch: Any) -> bool:
        """As `event_loop_overlap`: launch this batch, then look at what came of the one before."""
        own, result, had = self.scheduler, None, self.scheduler.last_batch is not None
        waits = own.is_disable_overlap_for_batch(batch, last_batch=own.last_batch)
        if waits:
            own.process_batch_result(*results.popleft())
        if batch:
            result = own.run_batch(batch)
            results.append((batch.copy(), result))
        if had and not waits:
            own.process_batch_result(*results.popleft())
        elif batch is None:
            own.on_idle()
        own.launch_batch_sample_if_needed(result, batch)
        own.last_batch = batch
        return had or batch is not None

    def run(self, before: Callable[[int], None], behind: Callable[[int], None]) -> int:
        """Turns until there is nothing to do."""
        turns = idle = 0
        while idle < 2:
            if turns == 2000:
                raise RuntimeError("two thousand turns, and requests are still there")
            before(turns)
            self.given.update({name: len(tokens) for name, tokens in self.outputs.items()})
            idle = 0 if self.step() else idle + 1
            behind(turns)
            turns += 1
        for request in self.requests.values():
            self._add("hits", request.cached_tokens)
            self._add("retractions", request.retraction_count)
        return turns

    def leave(self, name: str) -> None:
        """The client of a request goes away."""
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.abort_request(AbortReq(rid=name))

    @property
    def outputs(self) -> dict[str, list[int]]:
        return {name: list(request.output_ids) for name, request in self.requests.items()}


def install(interpreted: bool = False) -> None:
    """Let SGLang be imported here; before its first import. Trees need Triton's interpreter, which is slow."""
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
    sys.meta_path.append(_Absent())


def _let_masks_run() -> None:
    """What rebuilds a tree from its mask: SGLang's own Triton kernel, in place of `sgl_kernel`'s."""
    import sglang.srt.utils as utils

    own, utils.is_xpu = utils.is_xpu, lambda: True
    import sglang.kernels.ops.speculative.reconstruct_tree  # noqa: F401

    utils.is_xpu = own


def _let_peer_run(said: list[str]) -> None:
    """SGLang's own canary on a CPU; `said` gets what it logs of violations."""
    import logging

    import torch

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    own = logging.getLogger("sglang.srt.kv_canary.runner.violation_reporter")
    own.addHandler(Handler())
    own.setLevel(logging.WARNING)
    stream, empty = torch.cpu.Stream, torch.empty
    torch.cpu.Stream = lambda *args, **kwargs: stream()  # type: ignore[misc, assignment]
    torch.empty = lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)  # type: ignore[assignment]


def make_models(folder: Path, layers: int = 2) -> None:
    """A target of some layers, and a draft of one: mostly the next token hangs on the last one, as the draft knows it.

    So the right token is often among the draft's, and not always the first of them.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)

    def config(layers: int) -> Any:
        return LlamaConfig(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
            tie_word_embeddings=False, initializer_range=0.3, dtype="float32",
        )  # fmt: skip

    target, draft = (LlamaForCausalLM(config(count)).float() for count in (layers, 1))
    for model in (target, draft):
        models.quieten(model)
    target.save_pretrained(folder / "target")
    state = draft.state_dict()
    weights = {name.removeprefix("model."): w.clone() for name, w in state.items() if name.startswith("model.layers")}
    weights["fc.weight"] = models.last_token(64)
    (folder / "draft").mkdir(parents=True)
    save_file(weights, folder / "draft" / "model.safetensors", metadata={"format": "pt"})
    told = {**config(1).to_dict(), "architectures": ["LlamaForCausalLMEagle"]}
    (folder / "draft" / "config.json").write_text(json.dumps(told))
    save_standalone(folder / "standalone", target, LlamaForCausalLM(config(1)))


def save_standalone(folder: Path, target: Any, own: Any) -> None:
    """A small model of its own, which mostly says what the target does."""
    import torch

    own.load_state_dict(target.state_dict(), strict=False)
    own.lm_head.weight.data += torch.randn_like(own.lm_head.weight) * models.ASTRAY
    own.float().save_pretrained(folder)

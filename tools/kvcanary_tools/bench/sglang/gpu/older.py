"""SGLang 0.5.17 under the names that the plug-in uses of 0.5.23, where torch is 2.11; stand-ins for what is not there.

`install` before the first import of SGLang: packages that it imports and that are missing become empty ones; sgl-kernel
alone does not see an empty flashinfer, and takes its own kernels. `rename` once its scheduler is imported: what the
plug-in needs under new names is there under them, by SGLang's own values.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

ABSENT = (
    "flashinfer",
    "deep_gemm",
    "deep_ep",
    "torch_memory_saver",
    "triton_kernels",
    "torchcodec",
    "xgrammar",
    "llguidance",
    "outlines",
    "openai_harmony",
    "modelscope",
    "datasets",
    "torchao",
    "cutlass",
    "quack",
    "flash_attn",
    "tilelang",
    "vllm",
    "decord",
    "soundfile",
    "av",
    "mistral_common",
    "anthropic",
    "kernels",
    "helion",
    "humming",
    "tokenspeed_mla",
    "blobfile",
    "py_spy",
    "easydict",
    "smg_grpc_servicer",
    "nixl",
    "mooncake",
    "aiter",
    "sgl_deep_gemm",
    "flash_mla",
    "fla",
    "zstandard",
)


class _Nothing(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class Nothing(metaclass=_Nothing):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # a decorator
        return Nothing

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        top = name.split(".")[0]
        if top not in ABSENT or not self._is_for_sglang(top):
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec") and "." not in name:
                try:
                    if finder.find_spec(name, path, target) is not None:
                        return None
                except Exception:
                    pass
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__version__ = "9.9.9"
        module.__getattr__ = lambda name: _Nothing.__getattr__(Nothing, name)
        return module

    def exec_module(self, module: Any) -> None:
        pass

    @staticmethod
    def _is_for_sglang(top: str) -> bool:
        frame: Any = sys._getframe(2)
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            if not name.startswith(("importlib", "_frozen", __name__)):
                return bool(name.startswith("sglang" if top == "flashinfer" else ("sglang", "sgl_kernel")))
            frame = frame.f_back
        return False


def install() -> None:
    import transformers.audio_utils  # noqa: F401  (it asks for torchcodec's version where that can be found)

    sys.meta_path.insert(0, _Absent())


def rename() -> None:
    """After the scheduler's module was imported, before a scheduler is built."""
    import sglang.srt.managers.schedule_batch as batch
    import sglang.srt.managers.scheduler as scheduler
    import sglang.srt.mem_cache.base_prefix_cache as base
    import sglang.srt.mem_cache.chunk_cache as chunk
    import sglang.srt.mem_cache.radix_cache as radix
    import sglang.srt.model_executor.model_runner as runner
    import sglang.srt.speculative.eagle_worker_common as common
    import sglang.srt.speculative.eagle_worker_v2 as worker

    from kvcanary.adapters.sglang import attention_probe
    from kvcanary.adapters.sglang import scheduler as ours

    ours.check = lambda **told: []
    attention_probe.missing = lambda needs: []  # type: ignore[attr-defined]
    runner.ModelRunner.kv_index_translator = NoPlan()
    scheduler.Scheduler.record_weight_version_change = lambda self, new_version: None
    base.BasePrefixCache.checkpoint = lambda self, req: None
    for kind in {radix.RadixCache, *radix.RadixCache.__subclasses__(), chunk.ChunkCache}:
        if "cache_unfinished_req" in vars(kind):
            kind.cache_unfinished_req = _and_checkpoint(kind.cache_unfinished_req)

    class Kv(batch.ReqKvInfo):
        __slots__ = ("owner",)

        @property
        def req_pool_idx(self) -> Any:
            return self.owner.req_pool_idx

        @property
        def cache_protected_len(self) -> int:
            return self.owner.cache_protected_len

        @property
        def holds_kv(self) -> bool:
            return self.owner.kv is not None

    def put(self: Any, value: Any) -> None:
        if value is not None and not isinstance(value, Kv):
            told = {name: getattr(value, name) for name in ("kv_allocated_len", "swa_evicted_seqlen")}
            value = Kv(**told)
            value.owner = self
        self.__dict__["_kv"] = value

    batch.Req.kv = property(lambda self: self.__dict__.get("_kv"), put)
    sample, verify = common.eagle_sample, worker.EAGLEWorkerV2.verify
    last: list[Any] = []

    def sampled(*args: Any, **kwargs: Any) -> Any:
        result = sample(*args, **kwargs)
        last[:] = [result[-1]]
        return result

    def verified(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = verify(self, *args, **kwargs)
        result.accept_index = last.pop()
        return result

    common.eagle_sample, worker.EAGLEWorkerV2.verify = sampled, verified


class NoPlan:
    """What plans of slots are where a batch has none: its backends look slots up by themselves."""

    def own_plan(self, forward_batch: Any) -> NoPlan:
        return self

    def bind(self, batch: Any, reader: Any) -> None:
        pass

    bind_runner_slots = own_plan


def _and_checkpoint(method: Any) -> Any:
    def cache_unfinished_req(self: Any, req: Any, *args: Any, **kwargs: Any) -> None:
        method(self, req, *args, **kwargs)
        self.checkpoint(req)

    return cache_unfinished_req

"""The published KV-cache bugs that the catalogue is measured by: a thread of each, by the injection it calls for."""

from __future__ import annotations

from collections.abc import Iterable

#: A thread for each bug, behind the number of the injection that brings it back.
_THREADS = """
K01 sgl-project/sglang#27338 sgl-project/sglang#27460
K02 sgl-project/sglang#27360
K03 sgl-project/sglang#26972 vllm-project/vllm#16370
K04 sgl-project/sglang#26866 NVIDIA/TensorRT-LLM#10343
K05 sgl-project/sglang#25015
K06 ModelTC/LightLLM#1079 NVIDIA/TensorRT-LLM#18295 sgl-project/sglang#28254 sgl-project/mini-sglang@ef4367f
K07 mlc-ai/mlc-llm#2266
K08 sgl-project/sglang#7239
K09 sgl-project/sglang#8409
K10 sgl-project/sglang#10892 vllm-project/vllm#43810 vllm-project/vllm#13922 NVIDIA/TensorRT-LLM#13278
K11 sgl-project/sglang#27545 sgl-project/sglang#27664
K12 microsoft/DeepSpeed#2359 sgl-project/sglang#22930
K13 sgl-project/sglang#24617 sgl-project/sglang#25889
K14 sgl-project/sglang#13826 sgl-project/sglang-jax#1147 sgl-project/sglang#31616 NVIDIA/TensorRT-LLM#19120
K15 sgl-project/sglang#27731
K16 sgl-project/sglang#34189 NVIDIA/TensorRT-LLM#3424 huggingface/transformers#37574 sgl-project/sglang-jax#1487
K17 sgl-project/sglang#31215
K18 lightseekorg/tokenspeed#958 sgl-project/sglang#19897 vllm-project/vllm#41838 NVIDIA/TensorRT-LLM#17371
K19 sgl-project/sglang#10846
K20 vllm-project/vllm#54498 huggingface/text-generation-inference#2711 vllm-project/vllm#36580
K21 vllm-project/vllm#46899 vllm-project/vllm#52071
K22 vllm-project/vllm#14649
K23 NVIDIA/TensorRT-LLM#16448
K24 apache/tvm#17045
K25 sgl-project/sglang#18803 sgl-project/sglang#24063 sgl-project/mini-sglang#142 sgl-project/sglang#29352
K25 vllm-project/vllm#42273 vllm-project/vllm#47282
K26 sgl-project/sglang#38319 NVIDIA/TensorRT-LLM#15018
K27 sgl-project/sglang#38941 vllm-project/vllm#42571
K28 sgl-project/sglang#27586 sgl-project/sglang#25805 sgl-project/sglang#36135
K29 sgl-project/sglang#35270
K30 sgl-project/sglang#35049 vllm-project/vllm#46951 LMCache/LMCache#1858 kvcache-ai/Mooncake#778
K30 kvcache-ai/Mooncake#4239 LMCache/LMCache#207
K31 vllm-project/vllm#45704 vllm-project/vllm#48481 sgl-project/sglang#22811 sgl-project/sglang#33970
K31 sgl-project/sglang#31368 NVIDIA/TensorRT-LLM#9056 LMCache/LMCache#4870 ikawrakow/ik_llama.cpp#2083
K32 sgl-project/mini-sglang#103 NVIDIA/TensorRT-LLM#15546 NVIDIA/Megatron-LM#5715
K33 vllm-project/vllm#45100 sgl-project/sglang#35748 wtdcode/vllm-backport#63
K34 vllm-project/vllm#49377 vllm-project/vllm#49125 LMCache/LMCache#4086 vllm-project/vllm#54342
K34 NVIDIA/TensorRT-LLM#13815 InternLM/lmdeploy#4917
K35 ggml-org/llama.cpp#20075 vllm-project/vllm#47861
K36 vllm-project/vllm#55227
K37 vllm-project/vllm#17362 flashinfer-ai/flashinfer#527 LMCache/LMCache#4247 ovg-project/kvcached#391
K38 LMCache/LMCache#4991 ai-dynamo/dynamo#15079 sgl-project/sglang#31108 sgl-project/sglang#30233
K38 vllm-project/vllm#34526
K39 LMCache/LMCache#2206
K40 vllm-project/vllm#49250 GeeeekExplorer/nano-vllm#212 ROCm/ATOM#1807
K41 vllm-project/vllm#1514 flashinfer-ai/flashinfer#3136 vllm-project/vllm#50427
K42 vllm-project/vllm#51091 vllm-project/vllm#49716 vllm-project/vllm#55559 NVIDIA/TensorRT-LLM#16916
K42 sgl-project/sglang#20705 ggml-org/llama.cpp#5652
K43 vllm-project/vllm#57158 vllm-project/vllm#35219 vllm-project/vllm#43990 vllm-project/vllm#936
K44 vllm-project/vllm#51756
K45 ggml-org/llama.cpp#12160 ggml-org/llama.cpp#3825
K46 huggingface/transformers#47433 huggingface/transformers#38156 ml-explore/mlx-lm#1109
K47 ggml-org/llama.cpp#12253 ggml-org/llama.cpp#14059
K48 ggml-org/llama.cpp#27994
K49 microsoft/DeepSpeed#2485 sgl-project/sglang#34399
K50 microsoft/DeepSpeed#2506
K51 LMCache/LMCache#1101 GeeeekExplorer/nano-vllm#187 sgl-project/sglang#33442 sgl-project/sglang#27010
K52 vllm-project/vllm#51031 vllm-project/vllm#57260 vllm-project/vllm-ascend#14534 local-inference-lab/vllm#72
K53 ovg-project/kvcached#398
K55 sgl-project/mini-sglang@94fe255
"""
#: By injection.
PUBLISHED: dict[str, tuple[str, ...]] = {}
for _number, *_bugs in map(str.split, _THREADS.strip().splitlines()):
    PUBLISHED[_number] = (*PUBLISHED.get(_number, ()), *_bugs)


def injection_of(bugs: Iterable[str]) -> str:
    """The number of the first of them that is listed, or ""."""
    return next((number for bug in bugs for number, listed in PUBLISHED.items() if bug in listed), "")

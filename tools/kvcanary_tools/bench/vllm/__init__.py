"""The canary inside a running vLLM, and our engine beside one; each needs a GPU and vllm."""

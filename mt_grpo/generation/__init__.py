"""What generates, and the policy's weights on their way there. It stands below training, which only asks for rollouts.

adapters         LoRA as an adapter: whether a server can have it beside its weights, and its files
versions         names of pushed weights: which a server reports, which sampled a turn
samples          requests for samples, with images or without, and what their answers must be
engines          what training needs of an engine
vllm_engine      vLLM, as training sees it
sglang_engine    SGLang, as training sees it
connection       the connection to a server: its address and answers, retries, time limits
server_pool      one or several servers as one backend: who holds the weights, and what is proven of whom
weights          iteration over the policy's parameters
nccl_groups      NCCL groups of the trainer and a vLLM server's workers, over which weights go
weight_transfer  weights to servers: by disk, by NCCL
weight_sync      push, prove, push again after a restart
in_process       generation in this process, with TRL's own
"""

"""What generates, and the policy's weights on their way there. It stands below training, which only asks for rollouts.

samples          requests for samples, what their answers must be, and the names of the weights that sampled them
vllm_engine      the requests to a vLLM server
sglang_engine    the requests to an SGLang server, loaded by name
connection       the connection to a server: its address and answers, retries, time limits
server_pool      one or several servers as one backend: who holds the weights, and what is proven of whom
weights          the policy's parameters, and a LoRA as an adapter: whether a server can have it next to its weights
weight_transfer  weights to servers: by files, by NCCL
weight_sync      push, prove, push again after a restart
in_process       generation in this process, with TRL's own
"""

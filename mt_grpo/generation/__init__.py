"""What generates, and the policy's weights on their way there. It stands below training, which only asks for rollouts.

adapters         LoRA as an adapter: whether a server can have it beside its weights, and its files
versions         names of pushed weights: which a server reports, which sampled a turn
samples          requests for samples, with images or without, and what their answers must be
connection       the connection to a server: its address and answers, retries, time limits
prefix_cache     how much of the prompts servers had in their prefix caches
server_pool      one or several servers as one backend: who holds the weights, and what is proven of whom
weights          iteration over the policy's parameters
weight_file      the file of a push, written tensor by tensor
image_caches     what a server keeps of images, which ends with the weights that saw them
weight_transfer  weights to servers: by disk, by NCCL
weight_sync      push, prove, push again after a restart
in_process       generation in this process, with TRL's own
rollout_batch    a batch of running conversations
"""

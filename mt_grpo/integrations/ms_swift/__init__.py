"""ms-swift's multi-turn schedulers and rewards, with its names and its behaviour.

keys           what a recipe says of schedulers
protocol       its requests, responses and outputs
rewards        its reward classes
loop           the turns of a scheduler
loss           loss_scale as a mask
schedulers     the base classes of schedulers; those that give tips, and ReAct's
messages       a request's messages as text, and as the chat template takes them
pictures       tags `<image>`, the images of requests, and the pictures that the model reads
samples        a scheduler's responses, what it makes of them, and which one a request goes on from
session        one rollout as the engine of a scheduler: what the model reads, and what it answers
outputs        what a scheduler returned, as turns and records
paths          its import paths
conversation   the conversation that a scheduler runs
recipe         what a recipe says with its keys
"""

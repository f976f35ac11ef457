"""ms-swift's multi-turn schedulers and rewards, with its names and its behaviour.

keys           what a recipe says of schedulers
recipe         loads plug-ins, the scheduler and the rewards of a recipe
conversation   the conversation that a scheduler runs
loop           the turns of a scheduler that has no `run` of its own
session        one rollout as the engine of a scheduler: what the model reads, and what it answers
samples        a scheduler's responses, what it makes of them, and which one a request goes on from
messages       a request's messages as text, as the chat template takes them, and their images
outputs        what a scheduler returned, as turns and records
loss           loss_scale as a mask
schedulers     ms-swift's base classes of schedulers, and those that give tips
rewards        ms-swift's reward classes
math_worker    a process that compares mathematical answers
protocol       ms-swift's requests, responses and outputs
paths          ms-swift's import paths
"""

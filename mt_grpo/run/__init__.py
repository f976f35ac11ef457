"""Training runs: checkpoints, resuming, several nodes, and what is in flight.

next_prompts  which prompts a run asks for next
in_flight     the conversations of a step, and the queue of groups for later ones
checkpoints   which checkpoint a run resumes from, the settings it changes, and what `Trainer` does not load
nodes         several nodes: one output directory, one checkpoint to resume, the same settings
connect       the generation backend of a trainer: servers, an engine, or the model itself
trainer       TRL's trainer that saves, resumes and stops
"""

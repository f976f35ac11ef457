"""Training runs: checkpoints, resuming, several nodes, and saving after a failure.

next_prompts  which prompts come next, and their state in a checkpoint
in_flight     the conversations of a step and of later ones
saved_states  validation of what a checkpoint holds next to the weights
checkpoints   whether a folder is a complete checkpoint; what determines a run's results; room on the disk
nodes         several nodes: one output directory, one checkpoint to resume, the same settings
connect       the generation backend of a trainer: servers, an engine, or the model itself
trainer       TRL's trainer that saves, resumes and stops
"""

"""A run loses nothing: it checkpoints, resumes, and says why it stopped.

next_prompts  which prompts are asked for next, and what a checkpoint remembers of them
in_flight     the conversations of a step and of later ones
saved_states  what a checkpoint holds beside the weights, read before it is used
checkpoints   whether a folder is a whole checkpoint; what determines a run's results; room on the disk
loading       reading a checkpoint into a trainer
nodes         several nodes: one output directory, one checkpoint to resume, the same settings
snapshots     the state at the end of a step, for a resumed run
connect       a trainer and what samples for it: servers, an engine, or the model itself
trainer       TRL's trainer that saves, resumes and stops
"""

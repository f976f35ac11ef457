"""A run loses nothing: it checkpoints, resumes, and says why it stopped.

checkpoints   whether a folder is a whole checkpoint; what determines a run's results; room on the disk
nodes         several nodes: one output directory, one checkpoint to resume, the same settings
snapshots     the state at the end of a step, for a resumed run
backend       what samples for a trainer, and the weights that it samples from
trainer       TRL's trainer that saves, resumes and stops
ahead         conversations in flight while the policy trains
"""

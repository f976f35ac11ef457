"""Training runs: checkpoints, resuming, several nodes, and what is in flight.

in_flight     the conversations of a step, the queue of groups for later ones, which prompts are asked for next
checkpoints   which checkpoint a run resumes from, the settings it changes, what `Trainer` does not load, several nodes
trainer       TRL's trainer that saves, resumes and stops, and its generation backend
"""

"""ms-swift's multi-turn schedulers and rewards, with its names and its behaviour.

A scheduler's `run` (or `loop.drive`, for one with `step`) asks `conversation.SchedulerEngine`, which samples in a
`session.SchedulerSession`. `outputs` turns what it returned into records.
"""

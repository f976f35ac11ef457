"""What people see of a run. Nothing here changes what is trained.

metrics       metrics of rollouts and of credit
rollout_log   rows of whole conversations, in segments
progress      one line per log, and a row of metrics.jsonl
troubles      readings that mean trouble, of the first rollouts and of a running job
facts         what readings read of a recipe and of its first rollouts
last_lines    what a run prints at its end
preflight     the first batch, and what a run will do before it starts
"""

"""What people see of a run. Nothing here changes what is trained.

metrics       metrics of rollouts and of credit
rollout_log   rows of whole conversations, in segments
progress      one line per log, and a row of metrics.jsonl
preflight     the table of troubles: of the first batch, and of a running job
"""

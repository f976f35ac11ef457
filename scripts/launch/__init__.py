"""What scripts/train.sh and scripts/serve.sh start: the launcher, its keeper, the server, and the checks before them.

Only the checks import torch and the trainer; the launcher and the keeper stay small and start at once.
"""

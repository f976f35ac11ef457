"""What scripts/train.sh and scripts/serve.sh start: the launcher, its keeper, the server, and their checks."""

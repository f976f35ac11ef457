"""What scripts/view_rollouts.py is made of: the index of a log, and the parts of its page."""

"""What scripts/view_rollouts.py is made of: the newest rows of a log, what a row says, and the parts of its page."""

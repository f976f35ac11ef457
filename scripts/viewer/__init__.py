"""What scripts/view_rollouts.py is made of: what a row of the log says, the index, and the parts of its page."""

"""The rollouts of a log are trained in place of new ones.

keys       what a recipe says of it
rollouts   from the rows of a log to rollouts, and the conversations that they are
logged     reward functions that return what the log says
"""

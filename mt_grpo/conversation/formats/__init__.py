"""How a model writes calls and reads results. A format is a class with the methods of `mt_grpo.rollout.ToolFormat`."""

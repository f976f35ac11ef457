"""The programs that made the models and the data of hf_recipes/tiny.

Those of gym-model, tools-model, towns and sums are in commit 342dc01, that of calculator-agent-model in 025cb713, that
of calculator-model and calculator-hermes-model, tiny.py, in 1c9f7d36.
"""

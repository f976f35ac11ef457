"""Whether a recipe is right, and what it describes. All of it is checked before a model is loaded.

integrations    the table of integrations, and the choice of one for a recipe
keys            the keys: types, defaults, ranges, choices
data            training and test rows
refusals        settings that would train something else than they say
checks          checks that need a model's files, data or a server
plugins         files loaded by path: tools, rewards, environments
parse           YAML and command line into checked dataclasses
"""

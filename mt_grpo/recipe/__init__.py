"""Whether a recipe is right, and what it describes. All of it is checked before a model is loaded.

keys            the keys: types, defaults, ranges, choices
data            training and test rows
plugins         what a recipe names: files of tools and rewards, environments, integrations
checks          settings, data, model and server that do not fit each other
parse           YAML and command line into checked dataclasses
"""

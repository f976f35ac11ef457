"""Whether a recipe is right, and what it describes. All of it is checked before a model is loaded.

data            training and test rows
plugins         what a recipe names: data, files of tools and rewards, environments, integrations
checks          settings, data, model and server that do not fit each other
parse           the keys, and how YAML and command line become checked dataclasses
"""

"""verl's tools and interactions, with its names and its behaviour.

keys           the recipe keys
schemas        tool schemas, and what a tool returns
base           BaseTool, BaseInteraction, @function_tool; their results
search         the protocol of the search tool
builtin        the GSM8K tool and interaction, the search tool
paths          the import paths of all of these
config         YAML files of tools and interactions, Python files of functions
environment    one conversation with its tools and its interaction
conversation   the classes that a recipe's rollouts use
"""

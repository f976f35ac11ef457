"""verl's tools and interactions, with its names and its behaviour.

keys                 what a recipe says of tools and interactions
schemas              its tool schemas, and what a tool answers
base                 its BaseTool, @function_tool and BaseInteraction; results of either
search               Search-R1's protocol
mcp                  its tools behind MCP servers
scores               its reward functions
builtin              its GSM8K and search tools, and its GSM8K interaction
paths                its import paths
config               its YAML files, and Python files of functions
environment          one conversation with its tools and interaction
inference_template   the history rendered anew before each turn
recipe               what a recipe says with its keys
"""

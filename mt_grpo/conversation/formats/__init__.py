"""How a model writes calls and reads results. A format is a class with the methods of `mt_grpo.rollout.ToolFormat`.

control_tokens   text from outside never becomes structure
base             what formats share: the end of a turn, thinking, the ids behind a turn
hermes           calls as the chat template writes them, several in one turn
native           the syntaxes of calls of families of models
xml              the paper's format
choose           the list of formats, and the choice of one by its name
"""

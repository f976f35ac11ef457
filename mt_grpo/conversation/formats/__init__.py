"""How a model writes calls and reads results. A format is a subclass of `ChatFormat`.

control_tokens   text from outside never becomes structure
base             what formats share: the end of a turn, thinking, the ids behind a turn
hermes           calls as the chat template writes them, several in one turn; native: in the syntax of a family
choose           the paper's format, xml, and the choice of a format by its name
"""

"""How a model writes calls and reads results. A format is a subclass of `ChatFormat`.

control_tokens   text from outside never becomes structure
base             what formats share: the end of a turn, thinking, the ids behind a turn
choose           the paper's format, xml; hermes and native, whose calls the chat template writes; the choice by name
"""

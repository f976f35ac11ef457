"""One conversation between a model, its tools and its environment. It imports only `base` and `images`, and no server.

environments     one environment per conversation; validation of its replies and of the turns that it may have changed
conversations    the part of a class of conversations that no method changes; prompts, examples, requests, their budget
formats/         how a model writes calls and reads results
tools/           functions as tools: their descriptions, their arguments, running them, their results
"""

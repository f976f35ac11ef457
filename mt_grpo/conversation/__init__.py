"""One conversation between a model, its tools and its environment. It imports only `base` and `images`, and no server.

environments     one environment per conversation; validation of its replies and of the turns that it may have changed
prompt_examples  example conversations before the question, as the model reads them
conversations    the part of a class of conversations that no method changes; prompts, requests and their token budget
formats/         how a model writes calls and reads results
tools/           functions as tools: their descriptions, their arguments, running them, their results
"""

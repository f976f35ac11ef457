"""One conversation between a model, its tools and its environment. It imports only `base` and `images`, and no server.

environments     one environment per conversation; validation of its replies
prompt_examples  example conversations before the question, as the model reads them
turn_lists       validation of the lists of a rollout's turns
sampling         the sampling parameters of a request, and its remaining token budget
conversations    the part of a class of conversations that no method changes; the prompts of a batch, rendered once
formats/         how a model writes calls and reads results
tools/           functions as tools: their descriptions, their arguments, running them, their results
"""

"""One conversation between a model, its tools and its environment. It stands on `base` alone: it knows no server.

environments     one environment per conversation; what an environment says, checked
limits           what bounds a conversation, as keys of a recipe
pictures         pictures: read, marked in texts, and written as ids by the tokenizer
picture_parts    images in messages: parts of contents, columns of rows, as texts with marks
prompts          the prompts of a batch, each of them rendered once
prompt_examples  conversations that stand before the question, as the model reads them
turn_lists       the lists of a rollout's turns, checked once it is over
sampling         the sampling parameters of a request, and its room
conversations    the part of a class of conversations that no method changes
formats/         how a model writes calls and reads results
tools/           functions as tools: what the model reads of them, their arguments, running them, their results
"""

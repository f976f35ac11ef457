"""Images of conversations. `processor` is loaded when a model has one, and the rest is all that a text-only run reads.

pictures         an image, the ids and marks that stand for it, and what a forward pass reads instead
messages         images in contents of messages, in rows of the data, in results and in replies
processor        what the model's processor and its tokenizer make of images
"""

"""Images of conversations. `processor` is loaded when a model has one, and the rest is all that a text-only run reads.

pictures         an image, the ids and marks that stand for it, the forward pass; images in messages, rows and results
processor        what the model's processor and its tokenizer make of images
reader           which models read images
"""

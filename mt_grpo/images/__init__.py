"""Images of conversations. What a text-only run needs is in `pictures` and `reader`.

pictures         an image, and the ids and marks that stand for it
reader           which models read images, and the way to the following modules
messages         images in messages, rows, results and replies, which become texts with marks
forward          images in the forward pass
processor        what the model's processor and its tokenizer make of images
"""

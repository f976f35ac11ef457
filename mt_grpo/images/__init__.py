"""Images of a conversation.

pictures         images in a conversation, and the ids that stand for them
"""

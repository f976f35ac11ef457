"""A game of gymnasium as an environment.

keys          what a recipe says of a game
text          a game as text
environment   one game per conversation
"""

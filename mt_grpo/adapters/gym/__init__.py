"""A game of gymnasium as an environment.

text          a game as text
environment   one game per conversation
"""

"""Environments behind OpenEnv's servers, by their protocol (0.2 and 0.3). No package of theirs is needed.

keys          what a recipe says of servers
server        a server: what it says of itself, and its sessions
text          observations as text, and text as actions
environment   one session per conversation
load          a recipe's environment, tried before a model is loaded
"""

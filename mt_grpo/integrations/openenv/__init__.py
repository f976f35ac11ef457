"""Environments on OpenEnv servers, through their protocol. No package of OpenEnv is needed.

keys          recipe keys
environment   a session of a server per conversation, and questions to servers before a model is loaded
"""

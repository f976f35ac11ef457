"""Environments on OpenEnv servers, through their protocol. No package of OpenEnv is needed."""

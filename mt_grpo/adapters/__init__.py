"""Other houses' shapes, turned into the protocols of `mt_grpo.rollout`. Imported only where a recipe names them.

plugin_imports   what plug-ins import of a framework that is not installed
session          what the sessions of agents and of schedulers share
prefixes         texts that begin alike, each beginning tokenised once
house            what a house is to a recipe; checks that several houses share
acting           the tags of an action, and what a turn says, where turns are actions
agents/          a program that speaks OpenAI's or Anthropic's API runs the conversation
gym/             a game of gymnasium as an environment
openenv/         environments behind OpenEnv's servers
mcp/             tools of servers of the Model Context Protocol
verl/            verl's tools and interactions
ms_swift/        ms-swift's multi-turn schedulers and rewards
choose           the keys of all houses, and which one a recipe names
"""

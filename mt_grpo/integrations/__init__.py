"""Integrations of other frameworks through the protocols of `mt_grpo.rollout`. Imported only if a recipe names them.

session          the base of the sessions of agents and of schedulers
checks           checks of recipes, and limits on results, that several of them share
acting           the tags of an action, and the text of a turn that is an action
agents/          a program that speaks OpenAI's or Anthropic's API runs the conversation
gym/             a game of gymnasium as an environment
openenv/         environments on OpenEnv servers
mcp/             tools of MCP servers (Model Context Protocol)
verl/            verl's tools and interactions
ms_swift/        ms-swift's multi-turn schedulers and rewards
replay/          rollouts of a log, in place of new ones
"""

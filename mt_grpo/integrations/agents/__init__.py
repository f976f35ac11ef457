"""A program that speaks OpenAI's or Anthropic's API runs the conversation, and the policy answers it.

keys            the recipe keys
messages        requests in one form, and the APIs' errors
chat_api        /v1/chat/completions: requests, answers, streams
responses_api   /v1/responses: requests, answers, streams
response_items  its items and tools: those of an answer, and those of a request as messages and functions
anthropic_api   /v1/messages: requests, answers, streams, errors
chains          the tree of an agent's requests: which request continues which answer
prompts         messages and tools as the chat template takes them
session         one rollout as the model that an agent talks to
server          the HTTP server on the loopback address
launcher        a process that ends a command with the trainer
programs        an agent as a function or a command, and its end
conversation    the conversation that an agent runs
"""

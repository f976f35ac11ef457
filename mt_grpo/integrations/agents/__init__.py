"""A program that speaks OpenAI's or Anthropic's API runs the conversation, and the policy answers it.

keys            what a recipe says of an agent
messages        requests in one form, and the APIs' errors
chains          the tree of what an agent asked: which request goes on from which answer
chat_api        /v1/chat/completions: requests, answers, streams
responses_api   /v1/responses: requests, answers, streams
response_items  its items: those of an answer, those of a request as messages, references to both
response_tools  its tools as functions: namespaces, custom tools, what OpenAI's servers alone have
anthropic_api   /v1/messages: requests, answers, streams, errors
prompts         messages and tools as the chat template takes them
session         one rollout as the model that an agent talks to
server          the HTTP server on the loopback address, and the same for clients in this process
launcher        a process that ends a command with the trainer
programs        an agent as a function or a command, and its end
conversation    the conversation that an agent runs
"""

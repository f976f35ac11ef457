"""Other houses' shapes turned into the protocols of `mt_grpo`. Imported only when a recipe names them.

A module imports from the package, and from modules that stand above it in this list.

    plugin_imports    what plug-ins import of a framework that is not installed
    policy_time       seconds in which a program waits for the policy
    chat_messages     requests of OpenAI's API in one form, and its errors
    chains            the tree of what an agent asked: which request goes on from which answer
    chat_api          /v1/chat/completions: requests, answers, streams
    responses_api     /v1/responses: requests, answers, streams
    agent_prompts     messages and tools as the chat template takes them
    agent_session     one rollout as the model that an agent talks to
    agent_server      the HTTP server on the loopback address
    agent_transport   the same server for clients in this process
    agent_launcher    a process that ends a command with the trainer
    agent_commands    an agent as a command
    agent_programs    an agent as a function; the end of an agent of either kind
    openai_agent      the conversation that an agent runs
    inference_template  the history rendered anew before each turn
    gym_text          a game of gymnasium as text
    gym_environment   a game of gymnasium as an environment
    mcp_servers       servers of the Model Context Protocol: started, asked, started again
    mcp_tools         their tools
    verl_schemas      verl's tool schemas, and what a tool answers
    verl_tools        its BaseTool and @function_tool; results of either
    verl_interact     its BaseInteraction
    verl_search       Search-R1's protocol
    verl_mcp          its tools behind MCP servers
    verl_scores       its reward functions
    verl_builtin      its GSM8K and search tools, and its GSM8K interaction
    verl_paths        the import paths of verl
    verl_config       its YAML files, and Python files of functions
    verl_rows         what tools get of a row and of the conversation
    verl_environment  one conversation with verl's tools and interaction
    verl_recipe       what a recipe says with verl's keys
    swift_protocol    ms-swift's requests, responses and outputs
    swift_rewards     ms-swift's reward classes
    swift_loop        the turns of a scheduler
    swift_loss        loss_scale as a mask
    swift_schedulers  the base classes of schedulers
    swift_tips        schedulers that give a tip after a wrong answer
    swift_react       a scheduler whose calls are written as ReAct does
    swift_gym         environments, and the scheduler that plays them
    swift_openenv     the scheduler of environments behind an OpenEnv server
    swift_messages    a request's messages as text, and as the chat template takes them
    swift_samples     a scheduler's responses, and which one a request goes on from
    swift_revise      what a scheduler makes of a response
    swift_reading     what the model reads for a request
    swift_session     one rollout as the engine of a scheduler
    swift_outputs     what a scheduler returned, as turns and records
    swift_paths       the import paths of ms-swift
    ms_swift          the conversation that a scheduler runs
    swift_recipe      what a recipe says with ms-swift's keys
"""

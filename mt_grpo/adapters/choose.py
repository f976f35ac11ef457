"""The recipe keys of `mt_grpo.adapters`, and the class of conversations that a recipe names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mt_grpo.adapters.recipe_checks import OF_TOOLS, check_tool_format
from mt_grpo.recipe.keys import default_of
from mt_grpo.recipe.plugins import load_environment

OPENAI_AGENT, GYM = "openai_agent", "gym"  # values of `environment`
OF_GYM = ("gym_kwargs", "gym_actions", "gym_text", "gym_unfinished_reward")
OF_SCHEDULERS = ("external_plugins", "reward_funcs", "max_turns", "loss_scale", "completion_length_limit_scope",
                 "stop_words", "vllm_server_pass_dataset", "context_manager")  # fmt: skip
OF_VERL = ("tools_config_file", "tool_config_path", "interaction_config_file", "interaction_config_path")
OF_FUNCTIONS = ("function_tool_path", "mcp_config_file")  # tools that have no state of a conversation
OF_MCP = ("mcp_tools", "mcp_start_timeout", "mcp_max_concurrent_calls")
OF_VERL_TOOLS = ("max_tool_response_length", "tool_response_truncate_side")


@dataclass
class AdapterKeys:
    """Which program of another house takes part in the conversation. Those of ms-swift have its names."""

    agent: str | None = field(
        default=None, metadata={"help": "path.py:function of (row, client), with environment: openai_agent"}
    )
    agent_command: str | None = field(
        default=None,
        metadata={"help": "A program in place of agent: a row on standard input, OpenAI's API by address"},
    )
    agent_timeout: float = field(
        default=600.0, metadata={"help": "Seconds of the agent's own for one row, without its waits for the policy"}
    )
    max_model_calls: int = field(
        default=32, metadata={"help": "Completions that an agent or a scheduler may ask for, per rollout"}
    )
    multi_turn_scheduler: str | None = field(
        default=None, metadata={"help": "ms-swift's: the name in multi_turns of what runs the conversation"}
    )
    external_plugins: list[str] | None = field(
        default=None, metadata={"help": "ms-swift's: Python files that register schedulers, rewards, environments"}
    )
    reward_funcs: list[str] | None = field(
        default=None, metadata={"help": "ms-swift's: names in orms, with multi_turn_scheduler"}
    )
    max_turns: int | None = field(default=None, metadata={"help": "ms-swift's: responses per conversation"})
    loss_scale: str = field(
        default="default", metadata={"help": "ms-swift's: [base+]type[+type...], base of default, last_round, all"}
    )
    completion_length_limit_scope: str = field(
        default="per_round", metadata={"help": "ms-swift's: what max_completion_length bounds, per_round or total"}
    )
    stop_words: list[str] | None = field(
        default=None, metadata={"help": "ms-swift's: texts that end a response, which keeps them"}
    )
    gym_env: str | None = field(
        default=None,
        metadata={"help": "environment: gym: an id of gymnasium, or path.py:Class. Else ms-swift's: a name in envs"},
    )
    gym_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments of the game of environment: gym, a mapping"}
    )
    gym_actions: list[str] | None = field(
        default=None, metadata={"help": "Names of the game's actions, in the order of their numbers"}
    )
    gym_text: str | None = field(
        default=None, metadata={"help": "path.py:Class, a GymText: how the game reads, and what is an action"}
    )
    gym_unfinished_reward: float = field(
        default=0.0, metadata={"help": "Added to the return of an episode that the conversation ended, not the game"}
    )
    context_manager: str | None = field(
        default=None,
        metadata={"help": "ms-swift's: the name in context_managers of what edits gym_scheduler's history"},
    )
    use_gym_env: bool = field(
        default=False, metadata={"help": "ms-swift's: the environment's total_reward is a reward"}
    )
    vllm_server_pass_dataset: bool = field(
        default=True, metadata={"help": "ms-swift's: requests have the row's columns as data_dict"}
    )
    tools_config_file: str | None = field(
        default=None, metadata={"help": "verl's YAML of tools: a list of class_name, config, tool_schema"}
    )
    tool_config_path: str | None = field(default=None, metadata={"help": "Another name of tools_config_file"})
    tool_lifecycle: str = field(
        default="trajectory",
        metadata={"help": "When verl's tools are created and released: once per trajectory, or per call"},
    )
    function_tool_path: str | None = field(
        default=None, metadata={"help": "verl's Python file of functions under @function_tool"}
    )
    interaction_config_file: str | None = field(
        default=None, metadata={"help": "verl's YAML of interactions: a list of name, class_name, config"}
    )
    interaction_config_path: str | None = field(
        default=None, metadata={"help": "Another name of interaction_config_file"}
    )
    use_inference_chat_template: bool = field(
        default=False,
        metadata={"help": "verl's: the template renders the whole history before each turn, a record each"},
    )
    mcp_config_file: str | None = field(
        default=None,
        metadata={"help": "JSON with mcpServers, whose tools the model has"},
    )
    mcp_tools: list[str] | None = field(
        default=None, metadata={"help": "Names of the servers' tools, or server:tool. None: all"}
    )
    mcp_start_timeout: float = field(default=60.0, metadata={"help": "Seconds until an MCP server answers"})
    mcp_max_concurrent_calls: int = field(
        default=16, metadata={"help": "Calls of one MCP server at the same time, per rank"}
    )
    max_tool_response_length: int | None = field(
        default=None, metadata={"help": "Characters of one result of verl's tools. None: tokens alone bound it"}
    )
    tool_response_truncate_side: str = field(
        default="middle", metadata={"help": "Where a result that is too long loses characters: left, middle or right"}
    )


def load_conversation(script_args: Any, args: Any, base: type) -> tuple[type, Any]:
    """As `choose_conversation`, with `use_inference_chat_template`."""
    found, environment = choose_conversation(script_args, args, base)
    if not script_args.use_inference_chat_template:
        return found, environment
    if not getattr(found, "renders_all", True):
        raise ValueError(
            "use_inference_chat_template has no effect where an agent or a scheduler brings its messages. Remove it."
        )
    try:
        from mt_grpo.adapters.verl.inference_template import RenderedConversation
    except ImportError as error:
        raise ValueError(f"use_inference_chat_template needs the clone ({error}).") from None
    return type("RenderedConversation", (RenderedConversation, found), {}), environment


def choose_conversation(script_args: Any, args: Any, base: type) -> tuple[type, Any]:
    """(class of conversations, classes of environments or None) of a recipe. Raises `ValueError`.

    Args:
        script_args: `environment`, `tools_script` and the keys of adapters.
        args: The other settings.
        base: `MultiTurnToolEnv`.
    """
    is_scheduler = bool(script_args.multi_turn_scheduler or script_args.use_gym_env or script_args.gym_env)
    if script_args.environment in (GYM, OPENAI_AGENT) or is_scheduler:
        refuse_others(
            script_args, (*OF_VERL, *OF_FUNCTIONS, *OF_MCP, *OF_VERL_TOOLS, "tool_lifecycle"),
            "a conversation of this trainer's own",
        )  # fmt: skip
    if script_args.environment == GYM:
        return load_gym_conversation(script_args, args, base)
    refuse_others(script_args, OF_GYM, f"the line environment: {GYM}")
    if script_args.environment == OPENAI_AGENT and is_scheduler:
        raise ValueError(
            f"multi_turn_scheduler and environment: {OPENAI_AGENT} both run the conversation. Remove one."
        )
    if script_args.environment == OPENAI_AGENT:
        refuse_others(script_args, OF_SCHEDULERS, "the key multi_turn_scheduler")
        try:
            from mt_grpo.adapters.agents.conversation import load_agent_conversation
        except ImportError as error:
            raise ValueError(
                f"environment: {OPENAI_AGENT} needs a package that is not installed ({error}). Run "
                "`pip install -e .[agents]` in the clone. (A file of scripts/one_file.py has no adapters.)"
            ) from None
        return load_agent_conversation(script_args, args, base)
    refuse_others(script_args, ("agent", "agent_command"), f"the line environment: {OPENAI_AGENT}")
    if is_scheduler:
        try:
            from mt_grpo.adapters.ms_swift.recipe import load_scheduler_conversation
        except ImportError as error:
            raise ValueError(
                f"multi_turn_scheduler needs the clone ({error}): a file of scripts/one_file.py has no adapters."
            ) from None
        return load_scheduler_conversation(script_args, args, base)
    refuse_others(script_args, OF_SCHEDULERS, "the key multi_turn_scheduler")
    tools = either(script_args, "tools_config_file", "tool_config_path")
    interactions = either(script_args, "interaction_config_file", "interaction_config_path")
    if tools is None:
        refuse_others(script_args, ("tool_lifecycle",), "the key tools_config_file")
    if tools is None and script_args.function_tool_path is None and script_args.mcp_config_file is None:
        refuse_others(script_args, OF_VERL_TOOLS, "tools_config_file, function_tool_path or mcp_config_file")
    if tools is not None or interactions is not None:
        try:
            from mt_grpo.adapters.verl.recipe import load_verl_conversation
        except ImportError as error:
            raise ValueError(f"tools_config_file needs the clone ({error}).") from None
        return load_verl_conversation(script_args, base, tools, interactions)
    found, declared = load_environment(script_args.environment, script_args.tools_script, base)
    if declared is None and (script_args.function_tool_path or script_args.mcp_config_file):
        from mt_grpo.adapters.verl.recipe import load_verl_conversation  # for the rows' tool_selection

        return load_verl_conversation(script_args, base, None, None)
    return found, declared


def load_adapter_tools(script_args: Any) -> list[Callable]:
    """The tools of a recipe that stand beside those of `tools_script`. Raises `ValueError`."""
    tools = []
    if script_args.function_tool_path is not None:
        try:
            from mt_grpo.adapters.verl.recipe import load_function_tool_list
        except ImportError as error:
            raise ValueError(f"function_tool_path needs the clone ({error}).") from None
        tools += load_function_tool_list(script_args)
    if script_args.mcp_config_file is None:
        refuse_others(script_args, OF_MCP, "the key mcp_config_file")
        return tools
    try:
        from mt_grpo.adapters.verl.recipe import load_mcp_tool_list
    except ImportError as error:
        raise ValueError(
            f"mcp_config_file needs a package that is not installed ({error}). Run `pip install -e .[mcp]` in the "
            "clone. (A file of scripts/one_file.py has no adapters.)"
        ) from None
    return tools + load_mcp_tool_list(script_args)


def either(script_args: Any, key: str, other: str) -> str | None:
    """A path that two keys may name. Raises `ValueError` where both do."""
    if getattr(script_args, key) is not None and getattr(script_args, other) is not None:
        raise ValueError(f"{key} and {other} are two names of one key. Remove one.")
    return getattr(script_args, key) or getattr(script_args, other)


def load_gym_conversation(script_args: Any, args: Any, base: type) -> tuple[type, Any]:
    """The same for `environment: gym`."""
    refuse_others(script_args, ("agent", "agent_command"), f"the line environment: {OPENAI_AGENT}")
    refuse_others(script_args, (*OF_SCHEDULERS, "multi_turn_scheduler", "use_gym_env"), "ms-swift's gym_scheduler")
    try:
        from mt_grpo.adapters.gym.environment import load_gym_environment
    except ImportError as error:
        raise ValueError(
            f"environment: {GYM} needs a package that is not installed ({error}). Run `pip install -e .[gym]` in the "
            "clone. (A file of scripts/one_file.py has no adapters.)"
        ) from None
    check_tool_format(args.tool_format, f"environment: {GYM}")
    if script_args.tools_script is not None:
        raise ValueError(f"tools_script has no effect with environment: {GYM}: a turn is an action. Remove it.")
    for key in OF_TOOLS[1:]:  # without max_env_steps
        if getattr(args, key) != default_of(key, (type(args),)):
            raise ValueError(f"{key} has no effect with environment: {GYM}: a turn is an action. Remove it.")
    return base, load_gym_environment(script_args, args)


def refuse_others(script_args: Any, keys: tuple[str, ...], without: str) -> None:
    """Raise `ValueError` for a key that is set, and has no effect."""
    for key in keys:
        if getattr(script_args, key) != AdapterKeys.__dataclass_fields__[key].default:
            raise ValueError(f"{key} has no effect without {without}. Add it, or remove {key}.")

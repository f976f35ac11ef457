"""Old module paths: an ImportError that names the new one, for forks of the script and for plug-ins."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

# A module, and the modules of before whose definitions it has; below `mt_grpo`.
MOVED = """
rollout: protocols
base.event_loop: event_loop
base.json_types: json_types
base.ranks: ranks
base.fields: settings
base.files: output locks settings checkpoints
base.errors: server_errors
base.id_hashes: id_hashes
base.rows: rows
conversation.environments: replies environments
conversation.sampling: sampling data
conversation.formats.control_tokens: control_tokens
conversation.formats.base: chat_format
conversation.formats.xml: formats
conversation.formats.choose: formats
conversation.formats.hermes: hermes
conversation.formats.native: native
conversation.tools.signature: tools hermes formats
conversation.tools.arguments: tool_arguments
conversation.tools.results: tool_results
conversation.tools.threads: tool_threads
conversation.tools.processes: tool_processes
conversation.tools.math_limits: math_limits
generation.connection: vllm_server server_errors
generation.versions: versions
generation.server_pool: server_members routes server_pool
generation.weights: weights
generation.weight_sync: weight_sync
generation.weight_transfer: shared_folder nccl_group weight_transfer
generation.in_process: in_process
generation.rollout_batch: prefetch
training.tensors: tensors
training.records: records
training.rewards: scoring
training.reward_calls: reward_calls scoring
training.reward_numbers: scoring
training.reward_errors: reward_errors
training.token_checks: text_check token_checks
run.checkpoints: disk_room run_record checkpoints
run.nodes: nodes
run.snapshots: snapshots
run.trainer: saving resume
run.in_flight: admission checkpoints prefetch ahead training.in_flight run.ahead
recipe.keys: settings
recipe.data: data
recipe.refusals: off_policy refusals
recipe.checks: preflight scoring
recipe.parse: recipes
reports.metrics: run_log
reports.rollout_log: log_rows rollout_log
reports.progress: metrics_log progress
reports.troubles: readings watch
reports.preflight: run_plan batch_facts first_batch watch
adapters.choose: adapter_keys
adapters.house: adapter_keys adapters.recipe_checks
adapters.session: adapters.policy_time adapters.agent_session adapters.agent_prompts
adapters.agents.messages: adapters.chat_messages
adapters.agents.chains: adapters.chains
adapters.agents.chat_api: adapters.chat_api
adapters.agents.responses_api: adapters.responses_api
adapters.agents.prompts: adapters.agent_prompts
adapters.agents.session: adapters.agent_session
adapters.agents.server: adapters.agent_server adapters.agent_transport
adapters.agents.launcher: adapters.agent_launcher
adapters.agents.programs: adapters.agent_commands adapters.agent_programs
adapters.agents.conversation: adapters.openai_agent
adapters.gym.text: adapters.gym_text
adapters.gym.environment: adapters.gym_environment
adapters.mcp.servers: adapters.mcp_servers
adapters.mcp.tools: adapters.mcp_tools
adapters.ms_swift.protocol: adapters.swift_protocol
adapters.ms_swift.rewards: adapters.swift_rewards
adapters.ms_swift.loop: adapters.swift_loop
adapters.ms_swift.loss: adapters.swift_loss
adapters.ms_swift.schedulers: adapters.swift_schedulers adapters.swift_tips adapters.swift_react
adapters.ms_swift.gym: adapters.swift_gym adapters.swift_openenv
adapters.ms_swift.messages: adapters.swift_messages
adapters.ms_swift.samples: adapters.swift_samples adapters.swift_revise
adapters.ms_swift.session: adapters.swift_reading adapters.swift_session
adapters.ms_swift.outputs: adapters.swift_outputs
adapters.ms_swift.paths: adapters.swift_paths
adapters.ms_swift.recipe: adapters.swift_recipe
adapters.verl.schemas: adapters.verl_schemas
adapters.verl.base: adapters.verl_interact adapters.verl_tools
adapters.verl.builtin: adapters.verl_builtin
adapters.verl.search: adapters.verl_search
adapters.verl.scores: adapters.verl_scores
adapters.verl.mcp: adapters.verl_mcp
adapters.verl.paths: adapters.verl_paths
adapters.verl.config: adapters.verl_config
adapters.verl.environment: adapters.verl_rows adapters.verl_environment
adapters.verl.recipe: adapters.verl_recipe
adapters.verl.inference_template: adapters.inference_template
"""
KEPT = {"mt_grpo.plugins": "mt_grpo.recipe.plugins"}  # documented for plug-ins: the old path goes on working


def new_paths() -> dict[str, list[str]]:
    """The modules that have what an old one had, by its path.

    >>> new_paths()["mt_grpo.server_errors"]
    ['mt_grpo.base.errors', 'mt_grpo.generation.connection']
    """
    found: dict[str, list[str]] = {}
    for line in MOVED.split("\n")[1:-1]:
        new, _, olds = line.partition(": ")
        for old in olds.split():
            found.setdefault(f"mt_grpo.{old}", []).append(f"mt_grpo.{new}")
    return found


class OldPaths(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked by `import` for every module that is not loaded yet."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in KEPT:
            return importlib.util.spec_from_loader(name, self)
        if name.startswith("mt_grpo.") and (new := new_paths().get(name)):
            raise ModuleNotFoundError(f"{name} is now {' and '.join(new)}. Import it from there.", name=name)
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        new = importlib.import_module(KEPT[module.__name__])
        vars(module).update({key: value for key, value in vars(new).items() if not key.startswith("__")})


def install() -> None:
    """Have `import` ask first: another installation may still have the old modules, and must not be mixed in."""
    if not any(type(finder).__name__ == OldPaths.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, OldPaths())

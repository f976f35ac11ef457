"""The table of integrations: each has its keys and says which recipes it runs."""

import dataclasses
import os
import sys
from types import SimpleNamespace

import pytest

import mt_grpo_trainer as mt
from mt_grpo.base.fields import key
from mt_grpo.integrations.session import RolloutSession
from mt_grpo.recipe import integrations as choose
from mt_grpo.recipe.integrations import Integration
from mt_grpo.recipe.keys import make_absolute
from mt_grpo.rollout import StopReason


@dataclasses.dataclass
class PuppetKeys:
    puppet: str | None = key(None, "Who plays", needs="the line environment: theatre")


class Theatre(Integration):
    """An integration as a folder's keys.py has it."""

    keys, line = PuppetKeys, "environment: theatre"

    def runs(self, script_args):
        return script_args.environment == "theatre"

    def conversation(self, script_args, args, base):
        return type("Play", (base,), {"puppet": script_args.puppet}), None


PLAIN = vars(mt.recipe_classes()[0]()) | {"puppet": None}


def settings(**keys):
    return SimpleNamespace(**PLAIN | keys)


def load(**keys):
    args = mt.MTGRPOConfig(output_dir="x", use_cpu=True, bf16=False)
    return choose.load_conversation(settings(**keys), args, mt.MultiTurnToolEnv)


def test_a_new_integration_is_its_keys_and_its_place_in_the_list(monkeypatch):
    everyone = (*choose.integrations(), Theatre())
    monkeypatch.setattr(choose, "integrations", lambda: everyone)
    cls, environment = load(environment="theatre", puppet="Kasper")
    assert issubclass(cls, mt.MultiTurnToolEnv) and (cls.puppet, environment) == ("Kasper", None)
    assert load() == (mt.MultiTurnToolEnv, None)
    with pytest.raises(ValueError, match="puppet has no effect without the line environment: theatre"):
        load(puppet="Kasper")
    with pytest.raises(ValueError, match="gym_text has no effect without the line environment: gym"):
        load(environment="theatre", gym_text="a.py:B")
    with pytest.raises(ValueError, match="mcp_tools has no effect without the trainer's own conversation"):
        load(environment="theatre", mcp_tools=["a"])


def test_paths_of_each_kind_are_absolute(monkeypatch, tmp_path):
    """A list of files, `file:Class`, and what may be a name instead."""
    monkeypatch.chdir(tmp_path)
    files = dict(external_plugins=["a.py", "~/b.py"], environment="c.py:D", gym_text="e.py:F", gym_env="Blackjack-v1")
    args = mt.recipe_classes()[0](**files, mcp_config_file="g.json")
    make_absolute(args)
    assert args.external_plugins == [f"{tmp_path}/a.py", os.path.expanduser("~/b.py")]
    assert (args.environment, args.gym_text) == (f"{tmp_path}/c.py:D", f"{tmp_path}/e.py:F")
    assert (args.gym_env, args.mcp_config_file) == ("Blackjack-v1", f"{tmp_path}/g.json")


def test_results_of_mcp_are_cut_as_those_of_verl(monkeypatch):
    tools = SimpleNamespace(load_mcp_tools=lambda *given: given)
    monkeypatch.setitem(sys.modules, "mt_grpo.integrations.mcp.tools", tools)
    keys = dict(mcp_config_file="g.json", max_tool_response_length=4, tool_response_truncate_side="left")
    path, names, cut = choose.load_integration_tools(settings(**keys))
    assert (path, names, cut("0123456789")) == ("g.json", None, "(truncated)...6789")


def test_the_first_reason_to_end_a_rollout_counts():
    """Of several requests in flight each may meet another end."""
    env = SimpleNamespace(_tokenizer=lambda llm: None, format_of=lambda tokenizer: None)
    session = RolloutSession(env, None, None, None)
    session.stop(StopReason.MAX_TURNS)
    session.stop(StopReason.MAX_TOKENS)
    assert session.stop_reason == StopReason.MAX_TURNS


def test_no_two_have_the_same_key():
    """The later one would hide the other, with its default and its range."""
    names = [each.name for integration in choose.integrations() for each in dataclasses.fields(integration.keys)]
    names += [each.name for each in dataclasses.fields(mt.MTGRPOConfig)]
    assert len(names) == len(set(names))

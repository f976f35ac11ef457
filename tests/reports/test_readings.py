"""The table of readings: each one speaks at its threshold, not below it, and says where training is pointless."""

import pytest

from mt_grpo.reports.preflight import troubles

WELL = {
    "prompt/lacks_system": False, "prompt/lacks_tools": "", "prompt/num_lacking": 0, "prompt/ends_with_assistant": 0.0,
    "calls/failed": 0.5, "outcome/name": "right", "outcome/mean": 0.5,
    "outcome/constant": False, "outcome/scored": 32,
    "num_rollouts": 64, "prompt/lacks_all_tools": False, "has_tools": True,
    "learning_rate": 1e-6, "optim": "adamw_torch", "weights/stuck": 0.0, "temperature": 1.0,
    "stop/environment_error": 0.0, "stop/agent_error": 0.0, "stop/agent_timeout": 0.0, "frequent/failure": "",
    "credit/frac_groups_without_signal": 0.5, "tools/broken": 0.0, "tools/broken_name": "", "frequent/tool_error": "",
    "tools/all_broken": 0.0, "cut/by_turn": 0.0, "max_turn_tokens": 48, "completions/clipped_ratio": 0.0,
    "max_completion_length": 96, "max_tool_response_tokens": 48, "stop/context_length": 0.0, "calls/malformed": 0.0,
    "frequent/call_error": "", "rollouts/called": 0.5, "rollouts/ended": 0.5, "stop/max_turns": 0.0,
    "max_env_steps": 2, "lora": False,
    "rewards/unused": "", "credit_assignment": "mt_grpo", "rewards/num_varied_and_used": 1,
    "rewards/constant": "right 0.5", "rewards/num_given": 1,
    "rewards/num_varied": 1, "tokens/ids_differ": 0.0,
    "sampling/sampling_logp_difference/mean": 0.0, "sampling/cuts": "", "sampling/token_ratio_mean": None,
}  # fmt: skip
FIRST_TURNS, LAST_TURNS = (f"sampling/logp_difference_{which}_turns" for which in ("first", "last"))
NO_SIGNAL = {"credit/frac_groups_without_signal": 1.0}
# The name of a reading, facts in which it just does not speak, just does, and finds training pointless (None: never).
TABLE = [
    ("system prompt", {}, {"prompt/lacks_system": True, "has_tools": False}, {"prompt/lacks_system": True}),
    ("tools", {}, {"prompt/num_lacking": 1, "prompt/lacks_all_tools": True, "rollouts/called": 0.02},
     {"prompt/num_lacking": 1, "prompt/lacks_all_tools": True, "rollouts/called": 0.01, "has_tools": False}),
    ("last message", {}, {"prompt/ends_with_assistant": 0.1}, None),
    ("learning rate", {"learning_rate": 0.0099}, None, {"learning_rate": 0.01}),
    ("learning rate", {"learning_rate": 0.01, "optim": "sgd"}, None, {"learning_rate": 0}),
    ("learning rate", {"learning_rate": 5e-6, "lora": True}, {"learning_rate": 4.9e-6, "lora": True}, None),
    ("rounding", {"weights/stuck": 0.49}, {"weights/stuck": 0.5}, None),
    ("temperature", {"temperature": 1.49}, {"temperature": 1.5}, None),
    ("cut sampling", {"sampling/token_ratio_mean": 0.9}, {"sampling/cuts": "top_p=0.9"}, None),
    ("failures", {"stop/environment_error": 0.19}, {"stop/environment_error": 0.2}, {"stop/environment_error": 0.95}),
    ("failures", {"stop/agent_error": 0.1, "stop/environment_error": 0.09},
     {"stop/agent_error": 0.11, "stop/environment_error": 0.09}, {"stop/agent_error": 0.95}),
    ("failing tools", {"tools/broken": 0.49}, {"tools/broken": 0.5, "tools/all_broken": 0.97},
     {"tools/broken": 0.5, "tools/all_broken": 0.98}),
    ("cut off by max_turn_tokens", {"cut/by_turn": 0.49}, {"cut/by_turn": 0.5}, {"cut/by_turn": 0.95}),
    ("cut off", {"completions/clipped_ratio": 0.49}, {"completions/clipped_ratio": 0.5},
     {"completions/clipped_ratio": 0.95}),
    ("cut off", {"window": 20, "completions/clipped_ratio": 0.29}, {"window": 20, "completions/clipped_ratio": 0.3},
     None),
    ("malformed calls", {"calls/malformed": 0.79}, {"calls/malformed": 0.8, "calls/failed": 0.97},
     {"calls/malformed": 0.8, "calls/failed": 0.98}),
    ("no calls", {"rollouts/called": 0.02}, {"rollouts/called": 0.01}, None),
    ("no calls", {"rollouts/called": 0.0, "has_tools": False}, {"rollouts/called": 0.0}, None),
    ("no answers", {"rollouts/ended": 0.02}, {"rollouts/ended": 0.01}, None),
    ("turns at the limit", {"stop/max_turns": 0.79}, {"stop/max_turns": 0.8}, None),
    ("unused rewards", {}, {"rewards/unused": "lengths"},
     {"rewards/unused": "lengths", **NO_SIGNAL, "rewards/num_varied_and_used": 0}),
    ("no rewards", {"rewards/num_given": 2}, None, {"rewards/num_given": 0}),
    ("constant rewards", {"rewards/num_varied": 0}, None,
     {"rewards/num_varied": 0, "rewards/num_varied_and_used": 0, **NO_SIGNAL}),
    ("main outcome", {"outcome/constant": True, "outcome/mean": 0.0, "rewards/num_varied": 0},
     {"outcome/constant": True, "outcome/mean": 0.0}, None),
    ("no signal", {"credit/frac_groups_without_signal": 0.99}, None, NO_SIGNAL),
    ("tokens", {"tokens/ids_differ": 0.0}, {"tokens/ids_differ": 0.01}, None),
    ("logprobs", {"sampling/sampling_logp_difference/mean": 0.1}, {"sampling/sampling_logp_difference/mean": 0.11},
     None),
    ("logprobs of late turns", {FIRST_TURNS: 0.03, LAST_TURNS: 0.06}, {FIRST_TURNS: 0.03, LAST_TURNS: 0.061}, None),
    ("logprobs of late turns", {FIRST_TURNS: 0.01, LAST_TURNS: 0.05}, {FIRST_TURNS: 0.01, LAST_TURNS: 0.051}, None),
    ("effective share", {"sampling/effective_share": 0.5}, {"sampling/effective_share": 0.49}, None),
]  # fmt: skip


def test_well_runs_have_no_trouble_and_causes_stand_first():
    """Also where some are not known, as before the first batch."""
    assert troubles(WELL) == []
    assert troubles({**dict.fromkeys(WELL), "learning_rate": 1e-6, "optim": "adamw_torch"}) == []
    found = troubles(WELL | {"rewards/unused": "lengths", **NO_SIGNAL})
    assert {each.name: each.pointless for each in found} == {"unused rewards": False, "no signal": True}
    facts = {"stop/max_turns": 1.0, "rollouts/ended": 0.0, "calls/malformed": 1.0, "temperature": 2.0,
             "tools/broken": 1.0, "learning_rate": 1.0}  # fmt: skip
    assert [each.name for each in troubles(WELL | facts)] == [
        "learning rate", "temperature", "failing tools", "malformed calls", "no answers", "turns at the limit",
    ]  # fmt: skip


@pytest.mark.parametrize("name, below, at, pointless", TABLE)
def test_a_reading_speaks_at_its_threshold(name, below, at, pointless):
    assert troubles(WELL | below) == []
    for facts, ends in ((at, False), (pointless, True)):
        if facts is not None:
            found = {each.name: each.pointless for each in troubles(WELL | facts)}
            assert found == {name: ends}

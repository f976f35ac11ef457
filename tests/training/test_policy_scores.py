"""What reward functions ask the policy: numbers by hand, against transformers, and through a whole step."""

import math
import threading
from types import SimpleNamespace

import pytest
import torch
from test_rewards import load
from transformers import AutoModelForCausalLM, AutoTokenizer

import mt_grpo_trainer as mt
from mt_grpo.base.ranks import RunError
from mt_grpo.recipe.plugins import load_tools
from mt_grpo.rollout import Context, Rollout, ToolCall, ToolResult, Turn
from mt_grpo.training.policy_scores import (
    PolicyScores,
    asked_of,
    scores_of_model,
    scores_of_server,
    scores_of_trainer,
    turn_contexts,
)

TINY = "hf_recipes/tiny/calculator-model"
gain = load("information_gain")


class TwoWords(torch.nn.Module):
    """Behind 0 comes 0 with 3/4 and 1 with 1/4; behind 1 comes 1 with 9/10. In training mode all is even."""

    device = torch.device("cpu")

    def forward(self, input_ids, logits_to_keep, use_cache):
        table = torch.tensor([[0.75, 0.25], [0.1, 0.9]]).log()
        logits = table[input_ids] * (not self.training)
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


def of_model(model, written=None):
    return scores_of_model(model, written, torch.no_grad, lambda: "7")


@pytest.fixture(scope="module")
def tiny():
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32), AutoTokenizer.from_pretrained(TINY)


def test_logprobs_by_hand():
    model = TwoWords().train()
    policy = of_model(model)
    found = policy.logprobs([[0], [1, 0], [1]], [[1, 1, 0], [0], [1]])
    expected = [[0.25, 0.9, 0.1], [0.75], [0.9]]
    assert [[math.exp(x) for x in row] for row in found] == [pytest.approx(row, abs=1e-6) for row in expected]
    assert model.training and policy.version == "7"


def test_logprobs_are_those_of_transformers(tiny):
    model, _ = tiny
    generator = torch.Generator().manual_seed(0)
    pairs = [torch.randint(3, 60, (n,), generator=generator).tolist() for n in (5, 3, 17, 1, 1, 9)]
    found = of_model(model).logprobs(pairs[0::2], pairs[1::2])
    for context, continuation, row in zip(pairs[0::2], pairs[1::2], found, strict=True):
        with torch.no_grad():
            logps = model(torch.tensor([context + continuation])).logits[0].log_softmax(-1)
        places = range(len(context) - 1, len(context) + len(continuation) - 1)
        assert row == pytest.approx([logps[p, i].item() for p, i in zip(places, continuation)], abs=1e-5)


def test_equal_pairs_are_asked_once_and_each_is_answered_in_its_place():
    asked, lock = [], threading.Lock()

    def score(context, continuation):
        with lock:
            asked.append((*context, -1, *continuation))
        return [float(sum(context))] * len(continuation)

    for at_once in (1, 4):
        asked.clear()
        policy = PolicyScores(score, None, str, at_once)
        assert policy.logprobs([[1], [2], [1], [3]], [[5], [5, 6], [5], [5]]) == [[1.0], [2.0, 2.0], [1.0], [3.0]]
        assert sorted(asked) == [(1, -1, 5), (2, -1, 5, 6), (3, -1, 5)]
    for context, continuation in (([], [1]), ([1], [])):
        with pytest.raises(ValueError, match="pair 1 has no ids. Expected a context and a continuation"):
            policy.logprobs([[1], context], [[1], continuation])
    with pytest.raises(ValueError, match="zip"):
        policy.logprobs([[1]], [])


def test_contexts_of_an_edited_history_and_of_two_branches():
    turns = [Turn([10], None, "", "stop", observation_ids=[20]), Turn([30], None, "", "stop", observation_ids=[21]),
             Turn([40], None, "", "stop"), Turn([50], None, "", "stop", after=1)]  # fmt: skip
    turns[2].context = Context([], [1, 7])  # reads another history
    assert turn_contexts(Rollout([], [1, 2], turns=turns)) == [
        [1, 2, 10], [1, 2, 10, 20, 30], [1, 7, 40], [1, 2, 10, 20, 30, 21, 50]
    ]  # fmt: skip


def test_an_adapter_and_sharded_weights_are_refused():
    server = SimpleNamespace(adapter="v1", weight_version=lambda: "1")
    with pytest.raises(RunError, match="samples by an adapter.*Set weight_sync: disk"):
        scores_of_server(server, None).logprobs([[1]], [[2]])

    def wants(policy, **kwargs): ...

    env = SimpleNamespace(format_of=lambda tokenizer: None, tokenizer=None)
    functions = SimpleNamespace(functions=[wants])
    trainer = SimpleNamespace(reward_functions=functions, env=env, backend="transformers", _is_sharded=True)
    with pytest.raises(RunError, match="weights are sharded.*vllm_mode: server"):
        scores_of_trainer(trainer)
    functions.functions = [lambda **kwargs: 0]
    assert scores_of_trainer(trainer) == {}


def test_only_who_names_it_is_given_it_and_the_data_comes_first():
    def takes(policy=None, *, turn_contexts, **kwargs): ...

    assert asked_of([takes, lambda prompts, **kwargs: 0]) == {"policy", "turn_contexts"}
    assert asked_of([lambda **policy: 0]) == set()


# --- information gain ------------------------------------------------------------------------------------------------


class Told:
    """A policy that knows the answer to the degree that its context holds 100 (0.9), else 101 (0.5), else 0.1."""

    def encode(self, text):
        return {"<answer>": [1], "Paris": [2, 3], "the City": [4]}[text]

    def observation_ids(self, turn, texts):
        assert texts == [""] * len(turn.results)
        return [102]

    def logprobs(self, contexts, continuations):
        assert all(context[-1] == 1 for context in contexts)  # the opening is given, and not scored
        known = [0.9 if 100 in context else 0.5 if 101 in context else 0.1 for context in contexts]
        known = [0.05 if ids == [4] else p for p, ids in zip(known, continuations)]  # it never says the alias
        return [[math.log(p)] * len(ids) for p, ids in zip(known, continuations)]


def searched(query, text, found, **changes):
    return Turn([9], None, "", "stop", [ToolCall("search", {"query": query})], [ToolResult(text)],
                observation_ids=[found], **changes)  # fmt: skip


def test_a_turn_gains_what_its_results_tell():
    turns = [
        searched("capital of France", "It is Paris.", 100),  # from 0.1 to 0.9
        searched("rivers", "The Seine.", 101),  # 0.9 is known already
        searched("capital of France?", "It is Paris.", 100),  # the same passage again
        searched("is it PARIS", "PARIS!", 100),  # the call names the answer
        Turn([9], None, "", "stop", answer="Paris"),
    ]
    contexts, read = [], [8]
    for turn in turns:
        contexts.append(read + turn.token_ids)
        read = contexts[-1] + turn.observation_ids
    given = {"turn_contexts": [contexts], "policy": Told(), "answer": [{"value": "Paris", "aliases": ["the City"]}]}
    [[first, second, again, begged, last]] = gain.information_gain_reward_func([turns], **given)
    assert first == pytest.approx(0.1 * math.log(0.9 / 0.1)) and second == pytest.approx(0.0)
    assert (again, begged, last) == (0.0, None, None)
    assert gain.information_gain_reward_func([turns], **{**given, "answer": [None]}) == [[None] * 5]


def test_a_passage_gains_once():
    """Also where the second call's context does not hold the first one's results any more."""
    turns = [searched("capital", "It is Paris.", 100), searched("France", "It is Paris.", 100)]
    given = {"turn_contexts": [[[8], [8]]], "policy": Told(), "answer": ["Paris"]}
    [[first, second]] = gain.information_gain_reward_func([turns], **given)
    assert first > 0.2 and second == 0.0


def test_a_useless_result_costs_what_it_hides(monkeypatch):
    turns = [searched("x", "nothing", 105)]
    given = {"turn_contexts": [[[100]]], "policy": Told(), "answer": ["Paris"]}
    assert gain.information_gain_reward_func([turns], **given) == [[0.0]]
    monkeypatch.setattr(gain, "MEASURE", "probability")
    given["turn_contexts"] = [[[8]]]
    [[value]] = gain.information_gain_reward_func([[searched("x", "It is Paris.", 100)]], **given)
    assert value == pytest.approx(0.1 * (0.9 - 0.1))


def test_what_stands_behind_a_turn_is_written_as_the_conversation_writes_it(tiny):
    _, tokenizer = tiny
    env = mt.MultiTurnToolEnv(load_tools("tools/calculator.py"), None)
    written = env.format_of(tokenizer)
    turn = Turn(tokenizer("<tool>x</tool>")["input_ids"], None, "", "stop", [ToolCall("calculator", {})],
                [ToolResult("42")])  # fmt: skip
    _, _, ids = written.fit(turn, [], float("inf"), 64)
    policy = PolicyScores(None, written, str)
    assert policy.observation_ids(turn, ["42"]) == ids != policy.observation_ids(turn, [""])
    with pytest.raises(ValueError, match="zip"):
        policy.observation_ids(turn, [])
    assert policy.encode("42") == tokenizer("42", add_special_tokens=False)["input_ids"]


def test_a_run_pays_turns_by_what_they_found(tmp_path):
    """The recipe of the calculator, whose results are the answers: who got the right one gains."""
    seen = []

    def watched(rollout_turns, turn_contexts, policy, answer, **kwargs):
        """Information gain, and what it was of."""
        found = gain.information_gain_reward_func(rollout_turns, turn_contexts, policy, answer, **kwargs)
        for turns, row, gold in zip(rollout_turns, found, answer):
            seen.extend((value, turn.results[0].text == gold) for turn, value in zip(turns, row) if value is not None)
        return found

    arguments = ["--config", "hf_recipes/tiny/calculator.yaml", "--output_dir", str(tmp_path), "--max_steps", "2",
                 "--per_device_train_batch_size", "32", "--save_strategy", "no", "--report_to", "none"]  # fmt: skip
    script_args, args, model_args = mt.parse_arguments(arguments)
    trainer = mt.build_trainer(script_args, args, model_args)
    trainer = mt.MTGRPOEnvTrainer(
        model=trainer.model, env=trainer.env, turn_reward_funcs=[watched],
        outcome_reward_funcs=gain.OUTCOME_REWARD_FUNCS, args=args, train_dataset=trainer.train_dataset,
    )  # fmt: skip
    trainer.train()
    right, wrong = ([value for value, is_right in seen if is_right is kind] for kind in (True, False))
    assert len(right) > 5 and sum(right) / len(right) > 0.1
    assert not wrong or sum(right) / len(right) > sum(wrong) / len(wrong) + 0.1
    logged = [row["rewards/watched/mean"] for row in trainer.state.log_history if "rewards/watched/mean" in row]
    assert len(logged) == 2 and all(math.isfinite(x) for x in logged)

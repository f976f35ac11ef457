"""What reward functions ask the policy: numbers by hand, against transformers, and through a whole step."""

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import evaluate
import pytest
import torch
from datasets import Dataset
from test_rewards import load
from transformers import AutoModelForCausalLM, AutoTokenizer

import mt_grpo_trainer as mt
from mt_grpo.base.errors import RunError, ServerError, ServerLost
from mt_grpo.generation.samples import tagged
from mt_grpo.recipe.checks import check_groups
from mt_grpo.recipe.plugins import load_tools
from mt_grpo.rollout import Context, Rollout, StopReason, ToolCall, ToolResult, Turn
from mt_grpo.training import policy_scores
from mt_grpo.training.batch import Batch
from mt_grpo.training.policy_scores import (
    PolicyScores,
    asked_of,
    policy_of,
    scores_of_model,
    scores_of_servers,
    turn_contexts,
)
from mt_grpo.training.rewards import RewardFunctions

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
    return scores_of_model(model, written, torch.no_grad)


@pytest.fixture(scope="module")
def tiny():
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32), AutoTokenizer.from_pretrained(TINY)


def test_logprobs_by_hand_and_by_transformers(tiny):
    model = TwoWords().train()
    policy = of_model(model)
    found = policy.logprobs([[0], [1, 0], [1]], [[1, 1, 0], [0], [1]])
    expected = [[0.25, 0.9, 0.1], [0.75], [0.9]]
    assert [[math.exp(x) for x in row] for row in found] == [pytest.approx(row, abs=1e-6) for row in expected]
    assert model.training
    model, _ = tiny
    generator = torch.Generator().manual_seed(0)
    pairs = [torch.randint(3, 60, (n,), generator=generator).tolist() for n in (5, 3, 17, 1, 1, 9)]
    found = of_model(model).logprobs(pairs[0::2], pairs[1::2])
    for context, continuation, row in zip(pairs[0::2], pairs[1::2], found, strict=True):
        with torch.no_grad():
            logps = model(torch.tensor([context + continuation])).logits[0].log_softmax(-1)
        places = range(len(context) - 1, len(context) + len(continuation) - 1)
        assert row == pytest.approx([logps[p, i].item() for p, i in zip(places, continuation)], abs=1e-5)


def test_engines_adapters_and_sharded_weights(tiny):
    """An engine has the settings of DeepSpeed as its `config`."""
    model, _ = tiny
    engine = of_model(SimpleNamespace(module=model, config={"train_batch_size": 8}))
    limit = model.config.max_position_embeddings
    for policy in (engine, of_model(model)):
        assert policy.fits([5] * limit, []) is False and policy.fits([5] * (limit - 1), [5])
        assert not policy.fits([5] * limit, [5])
    pool = SimpleNamespace(servers=[SimpleNamespace(adapter=None), SimpleNamespace(adapter="v1")])
    with pytest.raises(RunError, match="samples with an adapter.*Set weight_sync: disk"):
        policy_of(trainer_of(backend="server", client=pool))
    with pytest.raises(RunError, match="a model that DeepSpeed or FSDP shards.*server scores the policy"):
        policy_of(trainer_of(backend="transformers", _is_sharded=True))


def test_equal_pairs_are_asked_once_and_those_that_fit():
    asked = []

    def ask(pairs):
        asked.extend(pairs)
        return {pair: [float(sum(pair[0]))] * len(pair[1]) for pair in pairs}

    policy = PolicyScores(ask, None)
    assert policy.logprobs([[1], [2], [1], [3]], [[5], [5, 6], [5], [5]]) == [[1.0], [2.0, 2.0], [1.0], [3.0]]
    assert sorted(asked) == [((1,), (5,)), ((2,), (5, 6)), ((3,), (5,))]
    for context, continuation in (([], [1]), ([1], [])):
        with pytest.raises(ValueError, match="pair 1 has . and . ids"):
            policy.logprobs([[1], context], [[1], continuation])
    with pytest.raises(ValueError, match="zip"):
        policy.logprobs([[1]], [])
    policy = of_servers(Server(0))  # a context of 10, of which one token is left to be sampled
    assert policy.fits([1] * 8, [2]) and not policy.fits([1] * 9, [2]) and not policy.fits([1], [])
    with pytest.raises(ValueError, match="pair 1 has 9 and 1 ids"):
        policy.logprobs([[1], [1] * 9], [[1], [1]])


def test_contexts_of_an_edited_history_and_of_two_branches():
    turns = [Turn([10], None, "", "stop", observation_ids=[20]), Turn([30], None, "", "stop", observation_ids=[21]),
             Turn([40], None, "", "stop"), Turn([50], None, "", "stop", after=1)]  # fmt: skip
    turns[2].context = Context([], [1, 7])  # reads another history
    assert turn_contexts(Rollout([], [1, 2], turns=turns)) == [
        [1, 2, 10], [1, 2, 10, 20, 30], [1, 7, 40], [1, 2, 10, 20, 30, 21, 50]
    ]  # fmt: skip


def trainer_of(**facts):
    env = SimpleNamespace(format_of=lambda tokenizer: None, tokenizer=None)
    return SimpleNamespace(**{"env": env, "_is_sharded": False, **facts})


class Server:
    """Answers its number for every id, holds a version, and may be lost or restart."""

    adapter, lineage, request_timeout = None, "boot", 600.0

    def __init__(self, number, version="3"):
        self.number, self.version, self.lost, self.asked = number, version, False, 0

    def weight_version(self):
        if self.lost:
            raise ServerLost("gone")
        return tagged(self.version, self.lineage)

    def healthy(self):
        return not self.lost

    def score(self, ids, timeout):
        assert timeout == policy_scores.LONGEST_REQUEST
        if self.lost:
            raise ServerLost("gone")
        self.asked += 1
        return [0.0] * (len(ids) - 2) + [float(self.number)]


def of_servers(*servers, joined=None, pushed="3"):
    pool = SimpleNamespace(servers=list(servers), joined=joined or list(range(len(servers))), max_model_len=10)
    return scores_of_servers(pool, None, lambda: pushed)


def test_which_servers_are_asked_and_asked_again(monkeypatch):
    servers = [Server(0), Server(1, version="2"), Server(2), Server(3)]
    policy = of_servers(*servers, joined=[0, 1, 3])  # 1 restarted, 2 was left out
    found = policy.logprobs([[k] for k in range(8)], [[7]] * 8)
    assert {row[0] for row in found} == {0.0, 3.0} and [s.asked for s in servers] == [4, 0, 0, 4]
    monkeypatch.setattr(policy_scores, "PAUSE", 0.0)
    server = Server(4)
    failures = [ServerLost("503"), ServerLost("reset")]
    server.score = lambda ids, timeout: (_ for _ in ()).throw(failures.pop()) if failures else [4.0]
    assert of_servers(server).logprobs([[1]], [[7]]) == [[4.0]]
    refusing, other = Server(0), Server(1)
    refusing.weight_version = lambda: (_ for _ in ()).throw(ServerError("404"))  # started without development mode
    assert of_servers(refusing, other).logprobs([[1], [2]], [[7]] * 2) == [[1.0]] * 2
    server.score = lambda ids, timeout: (_ for _ in ()).throw(ServerError("400 too long"))
    with pytest.raises(RunError, match="in 3 tries .* 400 too long"):
        of_servers(server).logprobs([[1]], [[7]])


def test_a_lost_server_leaves_the_others_and_a_restart_asks_again(monkeypatch):
    monkeypatch.setattr(policy_scores, "PAUSE", 0.0)
    servers = [Server(0), Server(1)]
    policy = of_servers(*servers)
    servers[0].score = lambda ids, timeout: setattr(servers[0], "lost", True) or Server.score(servers[0], ids, timeout)
    assert policy.logprobs([[1], [2], [3]], [[7]] * 3) == [[1.0]] * 3
    # A server that restarts meanwhile has answered by its first weights: nothing of that is kept.
    for lost in (False, True):  # True: it is lost behind its first answer, and so no longer asked
        servers = [Server(0), Server(1)]
        policy = of_servers(*servers)

        def restarted(ids, timeout, server=servers[0], lost=lost):
            if lost and server.version == "first":
                raise ServerLost("gone")
            server.version = "first"
            return [-9.0]

        servers[0].score = restarted
        assert policy.logprobs([[k] for k in range(1, 7)], [[7]] * 6) == [[1.0]] * 6, lost
    servers[1].lost = True
    with pytest.raises(RunError, match="in 3 tries no server answered that holds the weights.*No server"):
        policy.logprobs([[1]], [[7]])
    assert policy.logprobs([], []) == []  # nothing is asked of anybody
    assert of_servers(Server(5), pushed=None).logprobs([[1]], [[7]]) == [[5.0]]  # an evaluation has pushed nothing


def test_threads_ask_one_after_another_and_leave_the_model_as_it_was():
    model = TwoWords().train()
    policy, inside, most = of_model(model), [], []
    forward = model.forward

    def slow(**kwargs):
        inside.append(1)
        most.append(len(inside))
        found = forward(**kwargs)
        inside.pop()
        return found

    model.forward = slow
    with ThreadPoolExecutor(19) as pool:
        list(pool.map(lambda n: policy.logprobs([[0]], [[1] * n]), range(1, 20)))
    assert max(most) == 1 and len(most) == 19 and model.training


def batch_of(columns):
    turns = [Turn([4, 5], None, "", "stop"), Turn([6], None, "", "stop")]
    rollouts = [Rollout([], [1], 0, turns, StopReason.ANSWERED), Rollout([], [2], 1, turns[:1], StopReason.ANSWERED)]
    rows = [{"prompt": [], **{name: f"{name} {i}" for name in columns}} for i in range(2)]
    return Batch(rows, 2, data=rows, rollouts=rollouts)


def scored(functions, columns=(), policy="the policy", batch=None):
    told = {"trainer_state": None, "log_extra": None, "log_metric": None, "policy": policy}
    functions = RewardFunctions(functions, [1.0] * len(functions), 0)
    return functions.score(batch or batch_of(columns), told, 60.0, torch.device("cpu"))


def test_who_names_groups_sees_whole_ones():
    """By number, without a rollout that failed; where a rank would have a part of a group it is refused."""
    seen = {}

    def compares(groups, **kwargs):
        seen["groups"] = groups
        return [0.5] * len(groups)

    turns = [Turn([4], None, "", "stop")]
    rollouts = [Rollout([], [1], i, turns, StopReason.ANSWERED) for i in range(4)]
    rollouts[1].stop_reason = StopReason.ENVIRONMENT_ERROR
    batch = Batch([{"prompt": []}] * 4, 2, first=4, rollouts=rollouts)
    assert scored([compares], batch=batch) == [[0.5, None, 0.5, 0.5]] and seen == {"groups": [2, 3, 3]}
    sizes = {"num_generations": 2, "num_generations_eval": 3, "steps_per_generation": 1, "eval_strategy": "steps"}
    data = Dataset.from_list([{"prompt": []}])
    for train, test, refused in ((3, 3, True), (4, 4, True), (4, 6, False)):
        sizes |= {"per_device_train_batch_size": train, "per_device_eval_batch_size": test}
        with pytest.raises(ValueError, match="has the parameter groups") if refused else nullcontext():
            check_groups([compares], SimpleNamespace(**sizes), data)
    own_column = data.add_column("groups", [1])
    check_groups([compares], SimpleNamespace(**sizes | {"per_device_train_batch_size": 3}), own_column)
    row = {"prompt": [], "groups": "mine"}  # a column of the data
    assert scored([compares], batch=Batch([row] * 3, 2, first=3, rollouts=rollouts[:3])) == [[0.5, None, 0.5]]


def test_only_who_names_it_has_it_given_and_a_column_of_the_data_comes_first():
    seen = {}

    def asks(policy, turn_contexts, **kwargs):
        seen["asks"] = policy, turn_contexts
        return [0.0] * 2

    def other(**kwargs):
        seen["other"] = kwargs.get("policy")
        return [0.0] * 2

    assert asked_of([other, asks]) == {"policy", "turn_contexts"} and asked_of([other, lambda **policy: 0]) == set()
    scored([asks])
    assert seen["asks"] == ("the policy", [[[1, 4, 5], [1, 4, 5, 6]], [[2, 4, 5]]])
    scored([other])
    assert seen["other"] is None
    scored([asks, other], columns=["policy"])
    assert seen["asks"][0] == seen["other"] == ["policy 0", "policy 1"]


class Told:
    """A policy that knows the answer to the degree that its context holds 100 (0.9), else 101 (0.5), else 0.1."""

    def encode(self, text):
        return {"<answer>": [1], "Paris": [2, 3], "the City": [4], "?": []}[text]

    def fits(self, context, continuation):
        return len(continuation) > 0 and len(context) < 20

    def observation_ids(self, turn, texts):
        if any(texts):  # without the turn's own text, behind an end of its own
            assert turn.token_ids == [] and texts == [result.text for result in turn.results]
            return turn.observation_ids
        return [102]

    def logprobs(self, contexts, continuations):
        assert all(context[-1] == 1 for context in contexts)  # the opening is given, and not scored
        known = [0.9 if 100 in context else 0.5 if 101 in context else 0.1 for context in contexts]
        known = [0.05 if ids == [4] else p for p, ids in zip(known, continuations)]  # it never says the alias
        return [[math.log(p)] * len(ids) for p, ids in zip(known, continuations)]


def searched(query, text, found, **changes):
    return Turn([9], None, "", "stop", [ToolCall("search", {"query": query})], [ToolResult(text)],
                observation_ids=[found], **changes)  # fmt: skip


def gained(turns, contexts, policy=None, answer="Paris", **more):
    """What each turn of one rollout gains."""
    given = {"turn_contexts": [contexts], "policy": policy or Told(), "answer": [answer]}
    (row,) = gain.information_gain_reward_func([turns], **given, **more)
    return row


@pytest.mark.contract("information gain")
def test_a_turn_gains_what_its_results_tell():
    turns = [
        searched("capital of France", "It is Paris.", 100),  # from 0.1 to 0.9
        searched("rivers", "The Seine.", 101),  # 0.9 is known already
        searched("capital of France?", "It is Paris.", 100),  # the same passage again
        searched("is it PARIS", "PARIS!", 100),  # the call names the answer
        replace(searched("", "", 100), results=[ToolResult("Error: unknown tool 'Paris'", "call")]),
        Turn([9], None, "", "stop", answer="Paris"),
    ]
    contexts, read = [], [8]
    for turn in turns:
        contexts.append(read + turn.token_ids)
        read = contexts[-1] + turn.observation_ids
    first, second, *others = gained(turns, contexts, answer={"value": "Paris", "aliases": ["the City"]})
    assert first == pytest.approx(0.1 * math.log(0.9 / 0.1)) and second == pytest.approx(0.0)
    assert others == [0.0, None, 0.0, None]
    assert gained(turns, contexts, answer="?") == gained(turns, contexts, answer=None) == [None] * 6  # it has no ids
    assert gained(turns, [[8] * 20, *contexts[1:]])[0] is None
    # Also where the second call's context does not hold the first one's results any more.
    first, second = gained([turns[0], searched("France", "It is Paris.", 100)], [[8], [8]])
    assert first > 0.2 and second == 0.0


def test_what_an_alias_gains_and_a_useless_result_costs(monkeypatch):
    """The alias is told from one token, and what is known of the answer itself stays: 0.1 of each token."""

    class Alias(Told):
        def logprobs(self, contexts, continuations):
            told = [0.9 if 100 in context else 0.2 for context in contexts]
            known = [p if ids == [4] else 0.1 for p, ids in zip(told, continuations)]
            return [[math.log(p)] * len(ids) for p, ids in zip(known, continuations)]

    turns = [searched("capital", "The City.", 101), searched("France", "Paris.", 100), searched("x", "?", 102)]
    expected = [0.0, 0.1 * math.log(0.9 / 0.2), 0.0]
    assert gained(turns, [[8]] * 3, Alias(), ["Paris", "the City"]) == pytest.approx(expected)

    class Hides(Told):
        def logprobs(self, contexts, continuations):
            return [[-2.0 if 105 in context else -0.5] * len(ids) for context, ids in zip(contexts, continuations)]

    turns = [searched("x", "nothing", 105), searched("y", "nothing", 105)]
    # To ask the same again is no way out.
    assert gained(turns, [[100], [101]], Hides()) == pytest.approx([-0.15, -0.15])
    monkeypatch.setattr(gain, "MEASURE", "probability")
    assert gained([searched("x", "It is Paris.", 100)], [[8]]) == [pytest.approx(0.1 * (0.9 - 0.1))]


def test_the_result_alone_and_the_tokens_that_were_read(monkeypatch):
    """Without the turn's own text, here the id 100 of who knows the answer before it searches."""
    turn, logged = searched("x", "Nothing.", 101), []
    turn.token_ids = [100, 9]

    def value():
        return gained([turn], [[8, 100, 9]], log_metric=lambda *metric: logged.append(metric))

    assert value() == [pytest.approx(0.0)]  # 0.9 with the result, and 0.9 without it
    monkeypatch.setattr(gain, "OWN_TEXT", False)
    assert value() == [pytest.approx(0.1 * math.log(0.5 / 0.1))]
    assert logged == [("information_gain/tokens", 2 * (n + 1 + 1) + 4) for n in (3, 1)]


def test_what_is_given_before_the_answer_and_how_long_answers_count(monkeypatch):
    """A model that thinks first has the end of its thoughts given. Of a long answer its tokens' mean counts."""
    asked = []

    class Thinks(Told):
        def encode(self, text):
            return {"</think><answer>": [2, 1], "a long answer": [5, 6, 7, 8]}[text]

        def logprobs(self, contexts, continuations):
            asked.extend(zip(contexts, continuations, strict=True))
            return [[-1.0, -2.0, -3.0, -2.0] if 100 in context else [-4.0, -4.0, -8.0, -4.0] for context in contexts]

    monkeypatch.setattr(gain, "OPENING", "</think><answer>")
    value = gained([searched("x", "It is long.", 100)], [[8]], Thinks(), "a long answer")
    assert value == [pytest.approx(0.1 * (5.0 - 2.0))]
    assert asked == [([8, 100, 2, 1], [5, 6, 7, 8]), ([8, 102, 2, 1], [5, 6, 7, 8])]


def test_what_stands_behind_a_turn_is_written_as_the_conversation_writes_it(tiny):
    _, tokenizer = tiny
    env = mt.MultiTurnToolEnv(load_tools("tools/calculator.py"), None)
    written = env.format_of(tokenizer)
    turn = Turn(tokenizer("<tool>x</tool>")["input_ids"], None, "", "stop", [ToolCall("calculator", {})],
                [ToolResult("42")])  # fmt: skip
    _, _, ids = written.fit(turn, [], float("inf"), 64)
    policy = PolicyScores(None, written)
    assert policy.observation_ids(turn, ["42"]) == ids != policy.observation_ids(turn, [""])
    with pytest.raises(ValueError, match="zip"):
        policy.observation_ids(turn, [])
    further = [{"role": "user", "content": "And 1 + 2?"}]
    turn.results, turn.messages, ids = written.fit(turn, further, float("inf"), 64)
    assert policy.observation_ids(turn, ["42"]) == ids  # what the environment said stays
    without = tokenizer.decode(policy.observation_ids(turn, [""]))
    assert "And 1 + 2?" in without and "42" not in without
    turn.continuation = "So"
    with pytest.raises(ValueError, match="has a continuation by the environment"):
        policy.observation_ids(turn, ["42"])
    assert policy.encode("42") == tokenizer("42", add_special_tokens=False)["input_ids"]


def test_an_evaluation_asks_the_model_that_it_evaluates(tmp_path, tiny):
    arguments = ["--config", "hf_recipes/tiny/calculator.yaml", "--reward_fn", "rewards/information_gain.py",
                 "--output_dir", str(tmp_path), "--report_to", "none"]  # fmt: skip
    recipe = mt.parse_arguments(arguments)
    model, tokenizer = tiny
    found = evaluate.evaluate(model, recipe, 8, tokenizer=tokenizer, progress=False, greedy=True)
    assert found["exact_match"] == 1.0 and found["rewards"]["turn"]["information_gain_reward_func"] > 0.3


@pytest.mark.contract("information gain")
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
    trainer = mt.build_trainer(*mt.parse_arguments(arguments))
    trainer = mt.MTGRPOEnvTrainer(trainer.model, trainer.env, [watched], gain.OUTCOME_REWARD_FUNCS, args=trainer.args,
                                  train_dataset=trainer.train_dataset)  # fmt: skip
    trainer.train()
    right, wrong = ([value for value, is_right in seen if is_right is kind] for kind in (True, False))
    assert len(right) > 5 and sum(right) / len(right) > 0.1
    assert not wrong or sum(right) / len(right) > sum(wrong) / len(wrong) + 0.1
    logged = [row["rewards/watched/mean"] for row in trainer.state.log_history if "rewards/watched/mean" in row]
    assert len(logged) == 2 and all(math.isfinite(x) for x in logged)


@pytest.mark.parametrize("gold, answer, right", [
    ("France", "the FRANCE.", 1.0), ("France", None, 0.0), ("A", None, 0.0), ("A", "A", 1.0), ("A", "B", 0.0),
    ("+", "", 0.0), ("+", "+", 1.0), ("-5", "5", 0.0), ("-5", "-5.", 1.0), ("well-known", "well known", 1.0),
    ({"value": "A", "aliases": ["the letter a"]}, "letter", 1.0), ([], "x", None),
])  # fmt: skip
def test_an_answer_is_right_by_its_words(gold, answer, right):
    turn = Turn([], None, "", "stop", answer=answer)
    assert gain.exact_match_reward_func([[turn]], answer=[gold]) == [right]

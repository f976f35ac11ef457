"""From rows, conversations and rewards to what is trained and logged: values written by hand, in one process."""

import json
import math
import shutil
import types
import zlib

import golden_batch as golden
import pytest
import torch
from accelerate import Accelerator
from project import json_lines
from transformers import AutoTokenizer

from mt_grpo.recipe.data import make_arithmetic, make_chain
from mt_grpo.reports.metrics import EvaluationMetrics, conversation_columns, conversation_metrics, credit_metrics
from mt_grpo.rollout import Generation, Record, Rollout, StopReason, Turn
from mt_grpo.training.batch import Batch, unused_rewards
from mt_grpo.training.pass_metrics import DepthMetrics, PassMetrics, sampling_means
from mt_grpo_trainer import VLLMServerClient, build_trainer, parse_arguments


def read_log(out):
    return json_lines(out / "rollouts.rank0.jsonl")


@pytest.mark.contract("MTGRPOEnvTrainer", "mt_grpo", "turn_return", "merged", "outcome")
@pytest.mark.parametrize("name", golden.CASES)
def test_a_batch_is_what_was_written_by_hand(random_model, tmp_path, name):
    """Masks, logprobs and advantages per token, the log and the metrics, with two reward functions of each kind."""
    golden.assert_as_written(golden.run_case(random_model, tmp_path, name), name)


def test_rollouts_are_graded_by_their_own_rows(random_model, tmp_path):
    """In training and in evaluation, after a restart of the server too: `outcome_a` raises where they are not."""
    trainer = evaluating(random_model, tmp_path)
    trainer.llm.lost = (0, 2, 3, 5)
    trainer.train()
    assert trainer.llm.lost_so_far == [0, 2, 3, 5]
    log = read_log(tmp_path)
    assert [row["mode"] for row in log] == ["train"] * 8 + ["eval"] * 12
    assert sorted(row["answer"] for row in log[8:]) == ["17"] * 4 + ["42"] * 4 + ["99"] * 4
    for row in log:
        assert row["messages"][0]["content"] == f"What is {row['answer']}?"
        assert row["messages"][1]["content"].count(f" of {row['answer']}") == 1


def evaluating(model, out, *funcs, **changes):
    """A trainer that evaluates the written conversations, four rollouts of each of three prompts."""
    settings = dict(num_generations=4, eval_strategy="steps", eval_steps=1, num_generations_eval=4, **changes)
    trainer = golden.make_trainer(model, out, *funcs, **settings)
    trainer.llm = golden.ScriptedServer(trainer.processing_class)
    return trainer


@pytest.mark.contract("evaluation during training")
def test_the_metrics_of_an_evaluation_are_means_over_its_rollouts(random_model, tmp_path, monkeypatch):
    """Twelve rollouts in batches of eight and four: the eight that are written by hand, and the first four again.

    Another one starts anew, also behind one that was broken off in its second batch.
    """
    trainer = evaluating(random_model, tmp_path)
    trainer.model.eval()
    rewards = [6.0, 1.75, 1.75, 3.75, 5.25, 3.5, 3.25, 6.0, 1.75, 1.75, 3.75]  # R^O + R^T; rollout 7 has no outcome
    mean = sum(rewards) / 11
    expected = {
        "eval_reward": 38.5 / 11, "eval_frac_reward_scored": 11 / 12,  # 3.5; the mean of the batches' means is 3.438
        "eval_reward_std": (sum((r - mean) ** 2 for r in rewards) / 10) ** 0.5,
        "eval_rewards/outcome_b/mean": 7.0 / 9, "eval_rewards/turn_a/mean": (7.5 + 0.75 + 1.0 + 1.75) / 9,
        "eval_turns/mean": 25 / 12, "eval_turns/max": 3.0, "eval_tools/call_frequency": 17 / 12,
        "eval_stop/max_turns": 4 / 12, "eval_credit/frac_groups_without_signal": 0.0,
    }  # fmt: skip
    score, calls = trainer._calculate_rewards, []

    def breaks_off(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        trainer.batch.logged = score(*args) * 0 - 100.0  # what a metric of it would be made of
        return trainer.batch.logged

    trainer.evaluate()
    trainer.evaluate()
    monkeypatch.setattr(trainer, "_calculate_rewards", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate()
    monkeypatch.undo()
    trainer.evaluate()
    logged = [row for row in trainer.state.log_history if "eval_reward" in row]
    assert len(logged) == 3
    for row in logged:
        assert {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_an_evaluations_metrics_are_of_its_own_rollouts():
    """Two ranks evaluate three prompts twice in batches of four rows: the last two rows are the first ones again. Of
    three rollouts and of one: an extreme is one of all batches, a mean is weighted, and NaN is no number."""
    whole, metrics = EvaluationMetrics(), {"reward": []}
    for rewards in ([1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]):
        metrics["reward"].append(sum(rewards) / 4)
        columns = torch.tensor([[1.0, 2.0, 2.0, r] + [0.0] * 10 for r in rewards])  # as many turns as reward
        table = types.SimpleNamespace(outcome=torch.tensor(rewards), turn_total=torch.zeros(4))
        whole.add(metrics, Batch([], 1, facts=columns, logged=table.outcome[:, None], rewards=table), 6)
    whole.finish(metrics, ["match"])
    assert metrics["reward"] == metrics["rewards/match/mean"] == metrics["turns/mean"] == [0.5]
    nan = float("nan")
    whole = EvaluationMetrics()
    whole.rewards = [(torch.zeros(n, 1), torch.zeros(n)) for n in (3, 1)]
    whole.columns = [torch.zeros(3, 14), torch.zeros(1, 14)]
    metrics = {
        "reward": [0.0, 0.0], "ratio/max": [3.0, 5.0], "ratio/min": [0.5, 0.25], "gap_max": [2.0, 4.0],
        "gap_min": [2.0, 4.0], "entropy": [1.0, 2.0], "kl": [nan, 2.0], "clip/max": [nan, 1.0],
        "num_tokens": [7.0, 9.0], "rollout/staleness": [1.0, 2.0], "once": [6.0],
    }  # fmt: skip
    expected = {
        "ratio/max": [5.0], "ratio/min": [0.25], "gap_max": [4.0], "gap_min": [2.0], "entropy": [1.25], "kl": [2.0],
        "clip/max": [1.0], "num_tokens": [7.0, 9.0], "rollout/staleness": [1.0, 2.0], "once": [6.0],
    }  # fmt: skip
    whole.finish(metrics, ["match"])
    assert {name: metrics[name] for name in expected} == expected


def test_what_the_loss_uses_is_counted_by_token():
    """Two records of two rollouts. Of the six trained tokens the logprobs of one are not known on one side."""
    output = {
        "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
        "tool_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]),
        "advantages": torch.tensor([[1.0, 9.0, -2.0, 9.0], [0.0, 0.0, 0.0, 0.0]]),
        "importance_sampling_ratio": torch.tensor([[2.0, 9.0, 1.0, 9.0], [0.0, 0.5, 1.0, 3.0]]),
        "old_per_token_logps": torch.tensor([[2.0, 9.0, 1.0, 9.0], [1.0, 0.5, 1.0, 4.0]]).log(),
        "sampling_per_token_logps": torch.tensor([[0.0] * 4, [float("nan"), 0.0, 0.0, 0.0]]),
    }
    batch = Batch([{}] * 2, 1, owners=[0, 1])
    expected = {"credit/frac_groups_without_signal": 1 / 2, "credit/mean_abs_advantage": (1.0 + 2.0) / 6}
    found = credit_metrics(output, batch, Accelerator(cpu=True))
    assert found == pytest.approx(expected | {"credit/frac_rollouts_trained": 1.0})
    trained = output["completion_mask"] * output["tool_mask"] > 0
    names = ("old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio")
    given = *(output[name] for name in names), trained
    cut = sampling_means(*given, (0.5, 3.0), Accelerator(cpu=True))["sampling/frac_tokens_ratio_zero_or_clipped"]
    assert cut == (pytest.approx(3 / 6), 6)  # also the one that was raised
    found = sampling_means(*given, (0.0, 3.0), Accelerator(cpu=True))
    apart = sum(abs(math.log(x)) for x in (2.0, 1.0, 0.5, 1.0, 4.0)) / 5  # of those that are known
    assert {name: value for name, (value, _) in found.items()} == pytest.approx({
        "sampling/sampling_logp_difference/mean": apart, "sampling/sampling_logp_difference/max": math.log(4.0),
        "sampling/importance_sampling_ratio/min": 0.0, "sampling/importance_sampling_ratio/max": 3.0,
        "sampling/importance_sampling_ratio/mean": (2.0 + 1.0 + 0.0 + 0.5 + 1.0 + 3.0) / 6,
        "sampling/effective_share": (4.0 + 1.0 + 0.0 + 0.25 + 1.0 + 9.0) / 6,  # the mean of squares
        "sampling/frac_tokens_ratio_zero_or_clipped": 2 / 6,  # the one that is 0, and the one at the limit
        "sampling/token_ratio_mean": (2.0 + 1.0 + 0.5 + 1.0 + 4.0) / 5,
    })  # fmt: skip
    assert [weight for _, weight in found.values()] == [5, 5, 6, 6, 6, 6, 5, 6]


def test_numerics_are_counted_by_turn_and_by_depth():
    """Two passes. The first has turns 0 and 1 after a prompt of 3 tokens, the second turn 4 after one of 8."""
    depth, accelerator = DepthMetrics(), Accelerator(cpu=True)
    first = {"prompt_mask": torch.ones(1, 3), "turn_ids": torch.tensor([[0, 0, -1, 1, 1, -1]])}
    trained = torch.tensor([[True, True, False, True, True, False]])
    depth.add(first, trained, x=torch.tensor([[1.0, 3.0, 9.0, 4.0, 8.0, 9.0]]))
    second = {"prompt_mask": torch.ones(1, 8), "turn_ids": torch.tensor([[4, -1]])}
    values = {"x": torch.tensor([[5.0, 9.0]]), "logp_difference": torch.tensor([[0.25, 9.0]])}
    depth.add(second, torch.tensor([[True, False]]), **values)
    assert depth.metrics(accelerator) == {}  # one turn has a difference
    assert depth.lines["by_turn/x"] == [2.0, 6.0, None, None, 5.0]
    assert depth.lines["by_depth/x"] == [None, 1.0, (3.0 + 4.0 + 8.0) / 3, 5.0]  # 3, 4, 6, 7 and 8 tokens before them
    depth.clear()
    for k in (2, 3, 4, 5, 6, 7, 8, 99):  # the first two, and the last two
        one = {"prompt_mask": torch.ones(1, 1), "turn_ids": torch.tensor([[k]])}
        depth.add(one, torch.tensor([[True]]), logp_difference=torch.tensor([[float(k)]]))
    names = (f"sampling/logp_difference_{which}_turns" for which in ("first", "last"))
    assert depth.metrics(accelerator) == dict(zip(names, (2.5, 53.5)))
    assert len(depth.lines["by_turn/logp_difference"]) == 64
    depth.clear()
    assert depth.metrics(accelerator) == depth.lines == {}


def test_shares_are_of_what_there_is():
    """Two passes, one with weights of 2 and one without any: half of the tokens are in effect. It is no failure rate
    of 0, and so in no mean of batches."""
    metrics, logged = PassMetrics(), {}
    key, mean = "sampling/effective_share", "sampling/importance_sampling_ratio/mean"
    metrics.pool(logged, "train", {mean: (2.0, 4), key: (4.0, 4)})
    metrics.pool(logged, "train", {mean: (0.0, 4), key: (0.0, 4)})
    assert logged == {mean: [1.0], key: [0.5]}
    silent = Rollout([], [1], turns=[Turn([5], None, "", "stop")], stop_reason=StopReason.ANSWERED)
    metrics = conversation_metrics(conversation_columns([silent]))[0]
    names = {f"tools/{kind}_frequency" for kind in ("failure", "malformed", "timeout")} | {"tools/mean_seconds"}
    assert {name for name, value in metrics.items() if math.isnan(value)} == names
    assert metrics["tools/call_frequency"] == 0.0


def one_group(model, out, funcs, **settings):
    """A trainer that has scored the first four conversations, as one group."""
    settings = {"num_generations": 4, "per_device_train_batch_size": 4, "scale_rewards": "none", **settings}
    trainer = golden.make_trainer(model, out, funcs, **settings)
    trainer.llm = golden.ScriptedServer(trainer.processing_class)
    trainer.model.train()
    return trainer, lambda: trainer._generate_and_score_completions([golden.ROWS[0]] * 4)


def test_several_data_sets_of_an_evaluation_have_their_own_means(random_model, tmp_path):
    """The second one is not added to the first one's rollouts."""
    trainer = evaluating(random_model, tmp_path)
    rows = golden.Dataset.from_list(golden.ROWS)
    trainer.eval_dataset = {"all": rows, "first": rows.select([0])}
    trainer.model.eval()
    trainer.evaluate()
    logged = {name: value for row in trainer.state.log_history for name, value in row.items()}
    names = ("reward", "all_reward", "first_reward", "turns/mean", "first_turns/mean")
    found = {name: logged[f"eval_{name}"] for name in names if f"eval_{name}" in logged}
    assert found == pytest.approx(
        {"all_reward": 38.5 / 11, "first_reward": 13.25 / 4, "first_turns/mean": 9 / 4}, abs=1e-5
    )


def test_a_number_of_weight_0_is_no_score(random_model, tmp_path):
    """Half of the rollouts get 1.25, the others only a number that is logged: they are in no mean, and not trained."""

    def right(completions, **kwargs):
        return [1.25 if i % 2 else None for i in range(len(completions))]

    def length(completions, **kwargs):
        return [float(i) for i in range(len(completions))]

    trainer = evaluating(random_model, tmp_path, ([], [right, length]))
    trainer.reward_weights = torch.tensor([1.0, 0.0])
    trainer.train()
    logged = {name: value for row in trainer.state.log_history for name, value in row.items()}
    for mode, lengths in (("", [1, 3, 5, 7]), ("eval_", [1, 3, 5, 7, 1, 3])):  # in batches of 8 and 4
        scored = ("frac_reward_scored", "rewards/right/frac_scored", "rewards/length/frac_scored")
        expected = {"reward": 1.25, "reward_std": 0.0, "rewards/right/mean": 1.25, **dict.fromkeys(scored, 0.5)}
        expected["rewards/length/mean"] = sum(lengths) / len(lengths)
        found = {name: logged[f"{mode}{name}"] for name in expected}
        assert found == pytest.approx(expected), mode
    assert logged["credit/frac_rollouts_trained"] == 0.5
    rows = [row for row in read_log(tmp_path) if row["mode"] == "train"]
    assert [row["reward"] for row in rows] == [None, 1.25] * 4
    assert [row["rewards"]["length"] for row in rows] == list(range(8))  # what was given is shown
    assert [any(turn["num_trained"] for turn in row["turns"]) for row in rows] == [False, True] * 4


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo"])
def test_a_batch_without_a_score_trains_nothing(random_model, tmp_path, loss_type):
    """Not by the KL either, though the weights have moved away from the reference's."""

    def nothing(completions, **kwargs):
        return [None] * len(completions)

    trainer = golden.make_trainer(
        random_model, tmp_path, ([], [nothing]), num_generations=4, beta=0.5, loss_type=loss_type
    )
    with torch.no_grad():
        for weights in trainer.model.parameters():
            weights.mul_(1.5)
    trainer.llm = golden.ScriptedServer(trainer.processing_class)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert (logged["loss"], logged["grad_norm"], logged["frac_reward_scored"]) == (0.0, 0.0, 0.0)
    assert {logged[name] for name in ("reward", "kl", "entropy", "credit/mean_abs_advantage")} == {None}


@pytest.mark.parametrize(
    ("name", "none"),
    [("outcome", 1.0), ("merged", 0.0), ("mt_grpo", 0.0), ("turn_return", 0.0), ("gigpo", 0.0), ("zero_sum", 0.0)],
)
def test_what_has_signal_is_what_the_estimator_trains(random_model, tmp_path, monkeypatch, name, none):
    """Outcomes are equal, and turn rewards differ: between rollouts, and within two of them."""
    monkeypatch.setattr(golden, "OUTCOME_B", [1.0] * 4)
    monkeypatch.setattr(golden, "TURN_A", [[0.5, 0.0, 0.25], [1.0, 0.0], [0.0], [0.25, 1.0, 0.5]])
    trainer, score = one_group(random_model, tmp_path, ([golden.turn_a], [golden.outcome_b]), credit_assignment=name)
    output = score()
    assert trainer._metrics["train"]["credit/frac_groups_without_signal"] == [none]
    trained = output["advantages"] * output["completion_mask"] * output["tool_mask"]
    assert bool((trained != 0).any()) == (none == 0.0)


def test_what_is_out_of_the_loss_is_no_signal(random_model, tmp_path, monkeypatch):
    """Where all that would be trained is masked, a group has no signal, whatever its advantages."""
    trainer, score = one_group(random_model, tmp_path, ([golden.turn_a], [golden.outcome_b]))
    score()
    assert trainer._metrics["train"]["credit/frac_groups_without_signal"] == [0.0]
    # Truncated rollouts are out of the loss; rollouts 1 and 2, which are left, get the same.
    rewards = [], [golden.outcome_b]
    masked, score = one_group(random_model, tmp_path / "masked", rewards, mask_truncated_completions=True)
    roll_out = masked._roll_out

    def truncated(rows):
        rollouts = roll_out(rows)
        rollouts[0].stop_reason = rollouts[3].stop_reason = StopReason.MAX_TOKENS
        return rollouts

    monkeypatch.setattr(masked, "_roll_out", truncated)
    monkeypatch.setattr(golden, "OUTCOME_B", [1.5, 1.0, 1.0, 0.5])  # around 1.0: 0.5, 0, 0, -0.5
    score()
    assert masked._metrics["train"]["credit/frac_groups_without_signal"] == [1.0]


def test_a_reward_that_moves_nothing_is_counted(random_model, tmp_path):
    funcs = [golden.turn_a, golden.rollout_a], [golden.outcome_b]
    found = {}
    for name in ("outcome", "mt_grpo"):
        trainer, score = one_group(random_model, tmp_path / name, funcs, credit_assignment=name)
        score()
        found[name] = (
            [counts.tolist() for counts in trainer.batch.used],
            unused_rewards(["turn_a", "rollout_a", "outcome_b"], [trainer.batch]),
        )
    # Rollout 0 has no outcome, so what it was given is not compared. The others' numbers are in the comparison of
    # rollout 2, in which nothing was observed.
    assert found["outcome"] == ([[6, 3, 3], [0, 0, 3]], ["turn_a", "rollout_a"])
    assert found["mt_grpo"] == ([[6, 3, 3], [3, 2, 3]], [])


def test_a_batch_by_hand_and_what_replaces_its_rollouts():
    """Logprobs that one record does not know are None for all; a turn is trained unless its rollout is masked."""
    turns = [Turn([5, 6], [-1.0, -2.0], "", "stop", observation_ids=[7]), Turn([8], [-3.0], "", "stop")]
    batch = Batch([], 1, records=[*(Record([k], [turn]) for k, turn in enumerate(turns)), Record([], [])])
    ids, masks = ([[0], [1], [9]], [[5, 6, 7], [8], [9]]), [[1, 1, 0], [1], [0]]
    assert batch.loss_lists(9) == (*ids, masks, [[-1.0, -2.0, 0.0], [-3.0], [0.0]])
    turns[1].logprobs = None
    assert batch.loss_lists(9) == (*ids, masks, None)
    batch = Batch([], 2, truncated=[False, True, False])
    outcome = torch.tensor([0.0, 0.0, float("nan")])
    batch.rewards = types.SimpleNamespace(num_tokens=torch.tensor([[2, 0], [1, 3], [1, 1]]), outcome=outcome)
    none = [False, False]
    for masks, expected in ((False, [[True, False], [True, True], none]), (True, [[True, False], none, none])):
        assert batch.trained_turns(types.SimpleNamespace(mask_truncated_completions=masks)).tolist() == expected
    rows, rollouts = [{"a": 0}, {"a": 1}, {"a": 2}], list("abc")
    batch = Batch(rows, 1, rollouts=rollouts, extra={"all": [5, 6, 7], "one": [8]})
    batch.replace([2, 0], [{"a": 3}, {"a": 4}], ["d", "e"])
    assert (batch.rows, batch.rollouts) == ([{"a": 4}, {"a": 1}, {"a": 3}], ["e", "b", "d"])
    assert (batch.dropped, batch.num_rounds, batch.extra) == (["c", "a"], 1, {"all": [None, 6, None], "one": [None]})
    batch.replace([1], [{"a": 5}], ["f"])
    assert (batch.dropped, batch.num_rounds, batch.extra["all"]) == (["c", "a", "b"], 2, [None, None, None])
    assert (rows, rollouts) == ([{"a": 0}, {"a": 1}, {"a": 2}], ["a", "b", "c"])
    with pytest.raises(ValueError):
        batch.replace([0, 1], [{}], ["g"])


def spoil(columns):
    """Change everything that a reward function gets."""
    for turns in columns["rollout_turns"]:
        for turn in turns:
            turn.token_ids.reverse()
            turn.token_ids.append(1)
            turn.observation_ids.clear()
            turn.logprobs.clear()
            turn.text, turn.results, turn.state_key = "", [], "elsewhere"
            turn.messages.clear()
            if turn.tool_call is not None:
                turn.tool_call.arguments.clear()
        turns.reverse()
        turns.append(turns[0])
    for messages in columns["prompts"] + columns["completions"]:
        for message in messages:
            message["content"] = "spoiled"
            for each in message.get("tool_calls", []):
                each["function"]["arguments"].clear()
        messages.pop()
    for name in ("completion_ids", "prompts", "completions", "rollout_turns", "answer"):
        columns[name].reverse()
        columns[name].pop()


@pytest.mark.parametrize("name", ["mt_grpo", "turn_return"])
def test_a_reward_that_changes_its_arguments_changes_nothing_else(random_model, tmp_path, name):
    """What is trained, the log, and what the other functions get are as without it; a function may be async."""

    def turn_a(**columns):
        values = golden.turn_a(**columns)
        spoil(columns)
        return values

    async def outcome_b(**columns):
        values = golden.outcome_b(**columns)
        spoil(columns)
        return values

    funcs = [turn_a, *golden.FUNCS[0][1:]], [golden.outcome_a, outcome_b]
    golden.assert_as_written(golden.run_case(random_model, tmp_path, name, funcs=funcs), name)


class Writes(VLLMServerClient):
    """Answers each rollout with one text; a text that is cut by the limit ends by `length`."""

    def __init__(self, tokenizer, texts):
        super().__init__(tokenizer=tokenizer)
        self.texts, self.params = texts, []

    async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
        self.params.append(sampling_params)
        ids = self.tokenizer(self.texts[index], add_special_tokens=False)["input_ids"]
        return Generation(ids[:max_tokens], None, "stop" if len(ids) <= max_tokens else "length")


def alternating(completions, **kwargs):
    return [float(i % 2) for i in range(len(completions))]


def test_a_rollout_is_truncated_where_its_stop_reason_says_so(random_model, tmp_path):
    """Not where its last id is no end of turn, as after an answer. All lengths, shares and masks are by hand."""
    trainer = golden.make_trainer(
        random_model, tmp_path, ([alternating], [alternating]), num_generations=4, max_completion_length=40,
        mask_truncated_completions=True,
    )  # fmt: skip
    prompts = [[{"role": "user", "content": text}] for text in ("What is 17?", "What is 42?" + "." * 22)]
    trainer.env.max_turn_tokens, trainer.env.max_model_len = 20, 62  # prompts of 30 and 52 tokens
    end = "<|im_end|>"
    trainer.llm = Writes(trainer.processing_class, [
        "<answer>17</answer>", "<answer>1</answer>", "n" * 99, "five." + end,
        "n" * 99, "n" * 99, "no." + end, "ok" + end,
    ])  # fmt: skip
    trainer.model.train()
    output = trainer._generate_and_score_completions([{"prompt": prompts[i // 4], "answer": ""} for i in range(8)])
    reasons = [row["stop_reason"] for row in read_log(tmp_path)]
    assert reasons == ["answered", "answered", "max_tokens", "no_tool_call",
                       "context_length", "context_length", "no_tool_call", "no_tool_call"]  # fmt: skip
    lengths = [19, 18, 20, 6, 10, 10, 4, 3]
    assert output["completion_mask"].sum(1).tolist() == lengths
    trained = (output["completion_mask"] * output["tool_mask"]).sum(1).tolist()
    assert trained == [19, 18, 0, 6, 0, 0, 4, 3]
    metrics = {key: values[-1] for key, values in trainer._metrics["train"].items()}
    expected = {
        "completions/clipped_ratio": 3 / 8, "completions/mean_length": 90 / 8, "completions/min_length": 3.0,
        "completions/max_length": 20.0, "completions/mean_terminated_length": 50 / 5,
        "completions/min_terminated_length": 3.0, "completions/max_terminated_length": 19.0,
        "stop/answered": 2 / 8, "stop/max_tokens": 1 / 8, "stop/context_length": 2 / 8, "stop/no_tool_call": 3 / 8,
    }  # fmt: skip
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)


@pytest.fixture(scope="module")
def base_model(random_model, tmp_path_factory):
    """The random model as a base model: it and its tokenizer end a text by another token than the template a turn."""
    path = tmp_path_factory.mktemp("base-model") / "model"
    shutil.copytree(random_model, path)
    tokenizer = AutoTokenizer.from_pretrained(
        random_model, eos_token="<|endoftext|>", extra_special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    tokenizer.save_pretrained(path)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({**values, "eos_token_id": tokenizer.eos_token_id}))
    return str(path)


def test_a_turn_ends_where_the_chat_template_ends_it(base_model, tmp_path):
    """Though the model's and the tokenizer's own end is another token: in-process, and in what a server is told."""
    turns = []

    def keep(rollout_turns, **kwargs):
        turns.extend(turn for rollout in rollout_turns for turn in rollout)
        return alternating(rollout_turns)

    trainer = golden.make_trainer(base_model, tmp_path, ([keep], [keep]), num_generations=4, max_completion_length=256)
    tokenizer = trainer.processing_class
    end, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert (tokenizer.eos_token_id, trainer.model.config.eos_token_id) == (eos, eos)
    assert end in tokenizer.all_special_ids
    trainer.train()
    ended = [turn for turn in turns if turn.token_ids[-1] == end]
    assert ended  # the model ends one token in forty
    assert not any(end in turn.token_ids[:-1] or "<|im_end|>" in turn.text for turn in turns)
    assert all(turn.finish_reason == "stop" for turn in ended)
    assert "no_tool_call" in [row["stop_reason"] for row in read_log(tmp_path)]
    # TRL cuts a sample at its first end, so that transformers, which would go on sampling until then, has to know too.
    assert set(trainer.generation_config.eos_token_id) == set(trainer.generation_kwargs["eos_token_id"]) == {end, eos}
    assert trainer.llm._is_end(end) and trainer.llm._is_end(eos)  # also as the last token that a turn may have

    trainer.llm = Writes(tokenizer, ["ok<|im_end|>"] * 8)
    trainer.evaluate()
    assert all({end, eos} <= set(params["stop_token_ids"]) for params in trainer.llm.params) and trainer.llm.params


def build(tmp_path, *arguments):
    return build_trainer(*parse_arguments([
        "--config", "hf_recipes/tiny/calculator.yaml", "--output_dir", str(tmp_path / "out"), "--eval_strategy",
        "steps", "--eval_steps", "1", *arguments,
    ]))  # fmt: skip


def test_evaluation_is_by_the_test_file_or_by_problems_that_are_held_out(tmp_path):
    """A problem belongs to `test` if the CRC-32 of its expression is divisible by 10."""
    for split in ("train", "test"):
        rows = [{"question": f"{split} {i}", "answer": str(i)} for i in range(12)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = build(
        tmp_path, "--dataset_name", str(tmp_path), "--dataset_size", "8", "--dataset_test_split", "test[:2]"
    )
    assert trainer.train_dataset["question"][:] == [f"train {i}" for i in range(8)]
    assert trainer.eval_dataset["question"][:] == ["test 0", "test 1"]
    trainer = build(tmp_path, "--dataset_size", "500", "--dataset_test_split", "test[:50]")
    train, test = trainer.train_dataset["question"][:], trainer.eval_dataset["question"][:]
    assert (len(train), len(test)) == (500, 50)
    for questions, is_held_out in ((train, False), (test, True)):
        problems = [question.removeprefix("What is ").removesuffix("?") for question in questions]
        assert {zlib.crc32(problem.encode()) % 10 == 0 for problem in problems} == {is_held_out}


@pytest.mark.parametrize("make", [make_arithmetic, make_chain])
def test_no_generated_problem_is_in_both_splits(make):
    train, test = ({row["question"] for row in make(3000, seed, split)} for seed, split in ((0, "train"), (1, "test")))
    assert len(train) == len(test) == 3000 and not train & test

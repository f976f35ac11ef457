"""Rollouts of several records: trained as one, each token in its own context; rollouts without an environment."""

import copy
import math
import statistics
from types import SimpleNamespace

import golden_batch as golden
import pandas
import pytest
import records_batch as batch
import torch
from project import json_lines
from test_distributed import run as run_worker
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from mt_grpo.base.errors import RunError
from mt_grpo.rollout import Context, Record, Rollout, StopReason, Turn
from mt_grpo.training.batch import FURTHER_RECORDS, Batch, compare_ranks, trained_records
from mt_grpo_trainer import MTGRPOConfig

OUTCOMES = [], [golden.outcome_b]
CLOSE = 1e-5  # of a gradient's largest entry, in float32

pytestmark = pytest.mark.differs  # contexts here are made up: their ids are not those of their messages


@pytest.mark.contract("edited histories")
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
@pytest.mark.parametrize("layout", batch.LAYOUTS)
def test_a_cut_history_trains_as_a_whole_one(random_model, tmp_path, loss_type, layout):
    """16 records of 8 rollouts. With two steps the second one's importance ratios are not 1."""
    settings = dict(loss_type=loss_type, beta=0.1, evaluate=layout == "one", **batch.LAYOUTS[layout])
    whole = batch.train(random_model, tmp_path / "whole", **settings)
    cut = batch.train(random_model, tmp_path / "cut", batch.no_edit, **settings)
    assert batch.distance(whole["gradients"], cut["gradients"]) < CLOSE
    assert cut["log"]["loss"] == pytest.approx(whole["log"]["loss"], abs=1e-6)
    if layout == "one":
        assert cut["eval_loss"] == pytest.approx(whole["eval_loss"], abs=1e-6)
    assert (whole["log"]["records/mean"], cut["log"]["records/mean"]) == (1.0, 2.0)
    for key in ("credit/mean_abs_advantage", "reward", "turns/mean", "completions/mean_length", "num_tokens"):
        assert cut["log"][key] == pytest.approx(whole["log"][key], abs=1e-5), key


@pytest.mark.parametrize("stop", ["environment_stop", "max_turns", "max_tokens", "agent_done"])
def test_a_rollout_whose_last_turn_was_cut_off_is_truncated_whoever_ended_it(stop):
    """`mask_truncated_completions` would train it otherwise, on an answer of which the end is missing.

    But for an agent, whose requests have limits of its own.
    """
    turns = [[Turn([1], None, "", reason) for reason in ("length", last)] for last in ("stop", "length")]
    rollouts = [Rollout([], [], turns=each, stop_reason=StopReason(stop)) for each in turns]
    args = SimpleNamespace()
    assert compare_ranks(rollouts, args, 0)[2] == [stop == "max_tokens", stop != "agent_done"]


@pytest.mark.parametrize(
    "settings",
    [
        dict(loss_type="luspo", learning_rate=1e-3),
        dict(loss_type="cispo", epsilon_high=5.0, beta=0.1),
        dict(loss_type="dapo", ratios=batch.Near, old_logps="sampled"),
        dict(loss_type="dapo", ratios=batch.Near),  # what a server sampled is corrected per token
        dict(loss_type="grpo", ratios=batch.Near, beta=0.1),
        dict(loss_type="dapo", credit_assignment="outcome", turn_advantage_coef=1.0, num_iterations=2, max_steps=4),
        dict(loss_type="grpo", mask_truncated_completions=True, max_completion_length=200, funcs=OUTCOMES),
    ],
    ids=lambda settings: " ".join(settings),
)
def test_a_cut_history_trains_as_a_whole_one_with(random_model, tmp_path, settings):
    settings = {**batch.LAYOUTS["two steps"], **settings}
    whole, cut = (
        batch.train(random_model, tmp_path / name, edit, **settings)
        for name, edit in (("whole", None), ("cut", batch.no_edit))
    )
    assert batch.distance(whole["gradients"], cut["gradients"]) < CLOSE
    if settings.get("ratios"):
        key = "sampling/importance_sampling_ratio/mean"
        assert cut["log"][key] == pytest.approx(whole["log"][key], abs=1e-5)
        assert abs(cut["log"][key] - 1) > 0.05


def test_the_table_of_completions_is_per_rollout(random_model, tmp_path):
    """Prompts, rewards and mean advantages of whole rollouts, whatever records they have; the log of rollouts too."""
    tables, logs = [], []
    for name, edit in (("whole", None), ("cut", batch.no_edit)):
        out = tmp_path / name
        batch.train(random_model, out, edit, log_completions=True)
        tables.append(pandas.read_parquet(out / "completions/completions_00001.parquet"))
        rows = json_lines(out / "rollouts.rank0.jsonl")
        assert all((row.pop("records") > 1) <= (name == "cut") for row in rows)
        for turn in (turn for row in rows for turn in row["turns"]):
            assert (turn.pop("record") > 0) <= (name == "cut")
            for key in ("after", "context", "tools"):  # of the record that the turn begins
                turn.pop(key)
            turn["seconds"], turn["results"] = 0.0, [{**result, "seconds": 0.0} for result in turn["results"]]
        logs.append(rows)
    assert len(tables[0]) == 8
    assert logs[0] == logs[1]
    whole, cut = (table.pop("advantage") for table in tables)
    assert cut.to_list() == pytest.approx(whole.to_list(), abs=1e-6)
    assert len(set(whole)) > 4
    pandas.testing.assert_frame_equal(*tables)


def test_each_row_of_a_batch_is_of_its_rollout(monkeypatch):
    """The first rollout has two records, the second one was cut off. Rank 0 has three further records."""

    def turn(token, context=None):
        return Turn([token], [-1.0], "", "stop", context=context)

    rollouts = [Rollout([], [1], turns=[turn(5), turn(6, Context([], [2]))]), Rollout([], [1], turns=[turn(7)])]
    rollouts[0].stop_reason, rollouts[1].stop_reason = StopReason.ANSWERED, StopReason.MAX_TOKENS
    other = (3, [False] * 2, [False] * 2, "", True)
    monkeypatch.setattr("mt_grpo.training.batch.gather_object", lambda own: [other, *own])
    args = SimpleNamespace(top_entropy_quantile=1.0, entropy_coef=0.0, use_adaptive_entropy=False)
    batch = Batch([{}, {}], 2, first=2, rollouts=rollouts)
    batch.choose_records(args, 0)
    assert batch.owners[:3] == [0, 1, 0] and batch.failed == [False] * 4
    assert [record.completion_ids for record in batch.records] == [[5], [7], [6], [], []]
    args.mask_truncated_completions, batch.rewards = True, SimpleNamespace(outcome=torch.zeros(4))
    assert batch.zeros_where_untrained(batch.loss_lists(9)[2], args) == [[1], [0], [1], [0], [0]]
    assert batch.own(torch.arange(4)).tolist() == [2, 3]
    taken = batch.per_rollout({"ids": torch.tensor([[5], [7], [6], [9], [9]]), "num_items": torch.tensor(3)})
    assert taken["ids"].tolist() == [[5], [7]] and taken["num_items"] == 3
    assert [[row["ids"].tolist() for row in rows] for rows in taken[FURTHER_RECORDS]] == [[[6]], []]
    monkeypatch.setattr("mt_grpo.training.batch.gather_object", lambda own: [*own, other])
    batch = Batch([{}, {}], 2, rollouts=rollouts)
    batch.choose_records(args, 0)
    assert len(batch.records) == 2 + 3  # as many as on the other rank


def test_a_record_without_a_trained_turn_is_none():
    read, trained = Turn([5], None, "", "stop", trained=False), Turn([6], None, "", "stop", context=Context([], [2]))
    rollout = Rollout([], [1], turns=[read, trained])
    assert trained_records(rollout) == [Record([2], [trained], [1])]
    trained.trained = False
    assert trained_records(rollout) == [Record([], [])]
    trained.trained, rollout.stop_reason = True, StopReason.AGENT_ERROR
    assert trained_records(rollout) == [Record([], [])]


def test_what_ranks_agree_on(monkeypatch):
    """Further records of the rank that has most, failures and ends of all; a run ends where nothing can be trained."""
    error = ValueError("no board.")
    other = (0, [True], [True], "KeyError: 'x'")
    monkeypatch.setattr("mt_grpo.training.batch.gather_object", lambda own: [*own, other])

    def rollout(error=None, contexts=0, **settings):
        turns = [Turn([k], None, "", "stop", context=Context([], [2])) for k in range(1 + contexts)]
        return Rollout([], [1], turns=turns, error=error, **settings)

    args = SimpleNamespace(top_entropy_quantile=1.0, entropy_coef=0.0, use_adaptive_entropy=False)
    failed = rollout(error, stop_reason=StopReason.ENVIRONMENT_ERROR)
    assert compare_ranks([rollout(), failed], args, 7) == (0, [False, True, True], [False, False, True])
    too_long = Rollout([], [1], stop_reason=StopReason.CONTEXT_LENGTH)  # its prompt, after `reset`
    assert compare_ranks([rollout(), too_long], args, 7)[1] == [False, True, True]
    cut = rollout(contexts=2, stop_reason=StopReason.MAX_TOKENS)
    assert compare_ranks([cut, rollout(contexts=1)], args, 7) == (3, [False, False, True], [True, False, True])
    with pytest.raises(RunError, match="in all 3 rollouts of step 7: ValueError: no board"):
        compare_ranks([failed, failed], args, 7)
    args.use_adaptive_entropy = True
    assert compare_ranks([rollout()], args, 7)[0] == 0
    with pytest.raises(RunError, match="^use_adaptive_entropy=True compares the tokens of a whole batch"):
        compare_ranks([cut], args, 7)


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def spoken(index, number):
    """Per turn of a rollout what it says, and what the model reads behind it."""
    said = f"rollout {index} of {number}"
    call = f'<tool>{{"name": "echo", "args": {{"text": "{said}"}}}}</tool>'
    result = f"<|im_end|>\n<|im_start|>user\n<result>\n{said}\n</result><|im_end|>\n<|im_start|>assistant\n"
    turns = {"C": (call, result), "c": (call, ""), "a": (f"<answer>{said}</answer>", "")}
    return [turns[kind] for kind in golden.CONVERSATIONS[index]]


def edit_second(rollout, k):
    """Before turn 1 the model read three other tokens; turn 2 follows turn 1 as it was."""
    return [5, 6, 7 + rollout.index % 8] if k == 1 else None


def written_turns(model, tokenizer):
    """Of the batch, edited before each second turn, per rollout: (advantage, logprobs of the tokens) of each turn."""
    logprobs = []
    for index, advantages in enumerate(golden.MT_GRPO[: len(golden.SCORED)]):
        number = golden.ROWS[index // 4]["answer"]
        prompt = f"<|im_start|>user\nWhat is {number}?<|im_end|>\n<|im_start|>assistant\n"
        history, rows = ids_of(tokenizer, prompt), []
        for k, (advantage, (said, read)) in enumerate(zip(advantages, spoken(index, number), strict=True)):
            history = [5, 6, 7 + index] if k == 1 else history
            sampled = ids_of(tokenizer, said)
            logits = model(torch.tensor([history + sampled])).logits[0, len(history) - 1 : -1]
            rows.append((advantage, logits.log_softmax(-1).gather(1, torch.tensor(sampled)[:, None])[:, 0]))
            history = history + sampled + ids_of(tokenizer, read)
        logprobs.append(rows)
    return logprobs


def written_loss(model, tokenizer, loss_type):
    """Of the batch: -(sum of advantage * logprob), divided as the loss type says.

    Its gradient is that of the ratio-weighted loss at the weights that sampled.
    """
    turns = written_turns(model, tokenizer)
    logprobs = [[(advantage, each.sum(), len(each)) for advantage, each in rows] for rows in turns]
    if loss_type == "grpo":  # a rollout with all its records is the sequence
        means = [-sum(a * logprob for a, logprob, _ in rows) / sum(n for *_, n in rows) for rows in logprobs]
        return sum(means) / 7
    num_tokens = sum(n for rows in logprobs for *_, n in rows)
    return -sum(a * logprob for rows in logprobs for a, logprob, _ in rows) / num_tokens


@pytest.mark.contract("edited histories")
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "cispo"])
def test_each_turn_is_trained_in_the_context_in_which_it_was_sampled(random_model, tmp_path, loss_type):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(random_model), AutoTokenizer.from_pretrained(random_model)
    loss = written_loss(model.float(), tokenizer, loss_type)
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])[None]
    settings = dict(loss_type=loss_type, epsilon_high=5.0, **batch.LAYOUTS["accumulated"])  # where cispo cuts a ratio
    result = batch.train(random_model, tmp_path, edit_second, **settings)
    assert batch.distance(expected, result["gradients"]) < CLOSE
    if loss_type == "cispo":  # whose value is that of the logprobs too
        assert result["log"]["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert result["log"]["records/mean"] == 14 / 8  # two rollouts have a single turn


@pytest.mark.contract("old_logps")
@pytest.mark.parametrize("server, mode", [
    (batch.Near, "token_truncate"), (batch.Unknown, "token_truncate"), (batch.Near, "token_mask"),
])  # fmt: skip
def test_a_loss_that_clips_around_the_sampled_logprobs(random_model, tmp_path, server, mode):
    """PPO's: a token whose probability has moved by more than epsilon, the way its advantage pulls, has no gradient.

    A token whose logprob is not known has ratio 1, and one that a mode masks is not trained.
    """
    model, tokenizer = AutoModelForCausalLM.from_pretrained(random_model), AutoTokenizer.from_pretrained(random_model)
    losses, clipped, masked = [], [], []
    for rows in written_turns(model.float(), tokenizer):
        for k, (advantage, now) in enumerate(rows):
            sampled = torch.full_like(now, (-5.25, -5.5, -5.75)[k])  # the logprobs of `Near`
            if server is batch.Unknown:
                sampled[0] = now[0].detach()
            ratio = (now - sampled).exp()
            masked.append(ratio > 1.4 if mode == "token_mask" else ratio.isnan())
            loss = -torch.min(ratio * advantage, ratio.clamp(1 - 0.2, 1 + 0.3) * advantage)
            losses.append(loss.masked_fill(masked[-1], 0.0))
            clipped.append((ratio > 1.3) & (advantage > 0) | (ratio < 0.8) & (advantage < 0))
    loss, clipped, masked = torch.cat(losses).mean(), torch.cat(clipped), torch.cat(masked).float().mean()
    loss.backward()
    assert 0.1 < clipped.float().mean() < 0.9 and (0.02 < masked < 0.5 if mode == "token_mask" else masked == 0)
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])[None]
    settings = dict(loss_type="dapo", ratios=server, mode=mode, cut=1.4, epsilon=0.2, epsilon_high=0.3)
    settings |= batch.LAYOUTS["accumulated"]
    shorter = batch.train(random_model, tmp_path / "shorter", edit_second, old_logps="sampled", **settings)
    assert shorter["passes"] == 0
    assert batch.train(random_model, tmp_path / "policy 0", edit_second, **settings)["passes"] == 0
    settings["log_rollout_tokens"] = True
    folder = tmp_path / "sampled"
    result = batch.train(random_model, folder, edit_second, old_logps="sampled", **settings)
    assert batch.distance(expected, result["gradients"]) < CLOSE
    assert result["log"]["loss"] == pytest.approx(loss.item(), abs=1e-5)
    other = batch.train(random_model, tmp_path / "policy", edit_second, **settings)
    assert batch.distance(other["gradients"], result["gradients"]) > 0.01
    # How far both are apart is logged all the same: by the metric, and as the trainer's logprob of each token.
    key = "sampling/frac_tokens_ratio_zero_or_clipped"
    assert result["log"][key] == other["log"][key] > 0
    first, second = (
        [turn["trainer_logprobs"] for row in json_lines(out / "rollouts.rank0.jsonl") for turn in row["turns"]]
        for out in (folder, tmp_path / "policy")
    )  # fmt: skip
    assert first == second and len(first) > 8
    # With no pass before the step the loss's own pass says the same.
    assert result["passes"] == 1 and batch.distance(result["gradients"], shorter["gradients"]) < CLOSE
    names = [name for name in result["log"] if name.startswith("sampling/")]
    assert len(names) == 10
    for name in names:
        assert shorter["log"][name] == pytest.approx(result["log"][name], abs=1e-4), name


def test_every_sampled_token_is_trained_once_with_its_turns_advantage(random_model, tmp_path):
    trainer = batch.make_trainer(random_model, tmp_path, edit_second)
    trainer.model.train()
    output = trainer._generate_and_score_completions([golden.ROWS[i // 4] for i in range(8)])
    assert [len(rows) for rows in output["further_records"]] == [1, 1, 0, 1, 1, 1, 0, 1]
    sampled = 0
    unscored = [{key: output[key][7] for key in ("tool_mask", "completion_mask")}, *output["further_records"][7]]
    assert not any((row["tool_mask"] * row["completion_mask"]).any() for row in unscored)
    for index, further in zip(golden.SCORED, output["further_records"]):
        first = {key: value[index] for key, value in output.items() if torch.is_tensor(value) and value.ndim}
        lengths = [len(said) for said, _ in spoken(index, golden.ROWS[index // 4]["answer"])]
        expected = [a for a, length in zip(golden.MT_GRPO[index], lengths) for _ in range(length)]
        for row, of_row in zip((first, *further), (expected[: lengths[0]], expected[lengths[0] :]), strict=False):
            trained = (row["completion_mask"] * row["tool_mask"]).bool()
            assert row["advantages"][trained].tolist() == pytest.approx(of_row, abs=1e-5)
            assert not row["advantages"][~trained].any()
            sampled += int(trained.sum())
        for row in further:
            assert row["prompt_ids"][row["prompt_mask"].bool()].tolist() == [5, 6, 7 + index]
    whole = sum(sum(golden.per_token(i, [1] * len(golden.CONVERSATIONS[i]), 0)) for i in golden.SCORED)
    assert sampled == whole == output["num_items_in_batch"] and output["num_rows_in_batch"] == 7


@pytest.mark.parametrize("layout", ["one", "accumulated"])
def test_a_record_is_the_sequence_of_sapo(random_model, tmp_path, layout):
    """sapo takes a record as the sequence: its loss is the mean over 12 records of scored rollouts, however split."""
    result = batch.train(random_model, tmp_path, edit_second, loss_type="sapo", **batch.LAYOUTS[layout])
    # At ratio 1 a token counts 4 sigmoid(0) = 2 times its advantage, divided by the temperature of its sign.
    temperatures = (MTGRPOConfig.sapo_temperature_pos, MTGRPOConfig.sapo_temperature_neg)
    assert temperatures == (1.0, 1.05)
    means = []
    for index, advantages in zip(golden.SCORED, golden.MT_GRPO):
        lengths = [len(said) for said, _ in spoken(index, golden.ROWS[index // 4]["answer"])]
        values = [2 * a / (1.0 if a > 0 else 1.05) for a in advantages]
        means.append(values[0])
        if values[1:]:
            means.append(sum(v * n for v, n in zip(values[1:], lengths[1:])) / sum(lengths[1:]))
    assert len(means) == 12
    expected = -sum(means) / 12
    assert result["log"]["loss"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("key", ["top_entropy_quantile", "entropy_coef"])
def test_what_compares_the_tokens_of_a_batch_refuses_further_records(random_model, tmp_path, key):
    trainer = batch.make_trainer(random_model, tmp_path, edit_second, **{key: 0.5})
    with pytest.raises(RunError, match=rf"^{key}=0.5 compares the tokens.*Remove {key}\."):
        trainer.train()


def constant(completions, **kwargs):
    return [1.0] * len(completions)


def test_the_loss_of_a_router_counts_once(random_model, tmp_path):
    """Without advantages the loss is the router's: that of all tokens, not the sum over passes."""
    config = Qwen3MoeConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.5,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).float()
    tokenizer, losses = AutoTokenizer.from_pretrained(random_model), []
    for name, edit in (("whole", None), ("cut", batch.no_edit)):
        result = batch.train(
            copy.deepcopy(model), tmp_path / name, edit, funcs=([], [constant]), processing_class=tokenizer
        )
        losses.append(result["log"]["loss"])
    assert losses[0] > 0.5  # 0.5 times at least 1, the loss of a router without preference, per expert of a token
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


def seen(completions, log_extra, **kwargs):
    log_extra("seen", golden.rollout_numbers(completions))
    return [None] * len(completions)


def test_a_failed_rollout_is_in_nobodys_statistics(random_model, tmp_path):
    """Rollout 2 has no prompt and no turn, rollout 5 ended in the middle: outcomes are compared without them."""
    funcs = [*golden.FUNCS[0]], [*golden.FUNCS[1], seen]
    trainer = batch.make_trainer(
        random_model, tmp_path, batch.no_edit, failed=[5], at_once=[2], funcs=funcs, credit_assignment="outcome",
        turn_advantage_coef=1.0, log_completions=True, turn_reward_weights=golden.TURN_WEIGHTS,
        outcome_reward_weights=[*golden.OUTCOME_WEIGHTS, 1.0],
    )  # fmt: skip
    trainer.train()
    # R^O 3, 0.5, 1.5 around 5/3; 3 and 1 around 2; rollout 7 has no outcome.
    expected = [3 - 5 / 3, 0.5 - 5 / 3, None, 1.5 - 5 / 3, 1.0, None, -1.0, 0.0]
    log = json_lines(tmp_path / "rollouts.rank0.jsonl")
    for index, (row, advantage) in enumerate(zip(log, expected, strict=True)):
        turns = 0 if index == 2 else len(golden.CONVERSATIONS[index])
        assert row["turn_advantages"] == pytest.approx([advantage or 0.0] * turns, abs=1e-5)
        assert row["outcome_advantage"] == pytest.approx(advantage or 0.0, abs=1e-5)
        assert (row["group_size"], row["batch_size"]) == (4, 8)
        if advantage is None:
            assert row["stop_reason"] == "environment_error"
            assert set(row["rewards"].values()) == {None}
            assert set(row["turn_rewards"]) <= {None}
        else:
            assert row["rewards"]["outcome_a"] == golden.OUTCOME_A[index]
            assert row["turn_rewards"] == golden.TURN_REWARDS[index]
    metrics = trainer.state.log_history[0]
    assert metrics["stop/environment_error"] == 2 / 8
    assert metrics["records/mean"] == (16 - 1) / 8
    assert metrics["rewards/outcome_a/mean"] == pytest.approx(2.5 / 5)
    table = pandas.read_parquet(tmp_path / "completions/completions_00001.parquet")
    assert [None if pandas.isna(v) else v for v in table["seen"]] == [0, 1, None, 3, 4, None, 6, 7]

    # Without loss: as if nothing but the others' tokens had been sampled.
    sampled = sum(sum(golden.per_token(i, [1] * len(golden.CONVERSATIONS[i]), 0)) for i in (0, 1, 3, 4, 6))
    lengths = [sum(golden.per_token(i, [1] * len(k), 0)) for i, k in enumerate(golden.CONVERSATIONS)]
    loss = -sum((a or 0.0) * n for a, n in zip(expected, lengths)) / sampled
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)


def test_a_failed_rollout_is_in_nobodys_statistics_without_outcomes(random_model, tmp_path):
    """Turn rewards only: 0.875, none, 0 stand around 0.875/3; rollout 2 would be 0.25."""
    trainer = batch.make_trainer(
        random_model, tmp_path, failed=[2, 4, 5, 6, 7], funcs=([golden.rollout_a], []), credit_assignment="merged",
        turn_advantage_coef=1.0,
    )  # fmt: skip
    trainer.train()
    log = json_lines(tmp_path / "rollouts.rank0.jsonl")
    expected = [0.875 * 2 / 3, -0.875 / 3, 0.0, -0.875 / 3, 0.0, 0.0, 0.0, 0.0]
    assert [row["turn_advantages"][0] for row in log] == pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="module")
def by_rank(random_model, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    return batch.run_on_ranks(random_model, out / "one", 1), run_worker(2, random_model, out, "records"), out


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
def test_two_ranks_train_a_cut_history_as_a_whole_one(by_rank, loss_type):
    """Rank 0 has 9 records, rank 1 has 7."""
    for rank in by_rank[1]:
        (whole, eval_loss), (cut, eval_loss_of_cut) = rank[f"{loss_type}-grown"], rank[f"{loss_type}-cut"]
        assert batch.distance(whole, cut) < CLOSE
        assert eval_loss_of_cut == pytest.approx(eval_loss, abs=1e-6)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "sapo"])  # bnpo's mean is that of a rank's tokens
def test_two_ranks_train_records_as_one_does(by_rank, loss_type):
    """All further records are on rank 0."""
    (expected, _), two = by_rank[0][f"{loss_type}-edited"], by_rank[1]
    for rank in two:
        assert batch.distance(expected, rank[f"{loss_type}-edited"][0]) < CLOSE


@pytest.mark.parametrize("name", batch.SAMPLING)
def test_metrics_of_sampling_are_of_the_tokens_of_all_ranks(by_rank, name):
    """The second rank has no token that counts. Recomputed from the rollout log, which has the tokens of one way."""
    one, two, out = by_rank
    expected = one["sampling own pass"]
    logs = [row for rank in (0, 1) for row in json_lines(out / f"sampling tokens/rollouts.rank{rank}.jsonl")]
    apart = [
        theirs - sampled
        for row in logs
        for turn in row["turns"]
        for theirs, sampled, trained in zip(turn["trainer_logprobs"] or [], turn["logprobs"], turn["loss_mask"])
        if trained and sampled is not None
    ]
    assert len(logs) == 8 and len(apart) > 100
    mean = sum(map(abs, apart)) / len(apart)
    assert expected["sampling/sampling_logp_difference/mean"] == pytest.approx(mean, abs=1e-4)
    assert expected["sampling/token_ratio_mean"] == pytest.approx(sum(map(math.exp, apart)) / len(apart), abs=1e-4)
    for found in (one, *two):
        assert len(found[f"sampling {name}"]) >= 11
        assert found[f"sampling {name}"] == pytest.approx(expected, abs=1e-4)
    for k in range(3):
        of_turn = [
            abs(theirs - sampled)
            for row in logs
            for turn in row["turns"][k : k + 1]
            for theirs, sampled, trained in zip(turn["trainer_logprobs"] or [], turn["logprobs"], turn["loss_mask"])
            if trained and sampled is not None
        ]
        assert one["by depth own pass"][f"by_turn/logp_difference/{k}"] == pytest.approx(
            statistics.mean(of_turn), abs=1e-4
        )
    for found in (one, two[0]):
        assert len(found[f"by depth {name}"]) >= 9 + 3 * 4  # three turns, up to 2^k tokens
        assert found[f"by depth {name}"] == pytest.approx(one["by depth own pass"], abs=1e-4)


def test_ranks_share_the_facts_and_the_end_of_a_run(by_rank):
    """Rank 0 has CCc, Ca, a and CCc: two answers, three that call. Of rank 1's four, all failed, three had called."""
    for found in (by_rank[0], *by_rank[1]):
        assert found["facts"] == {"rollouts/ended": 2 / 8, "rollouts/called": 6 / 8, "num_rollouts": 8}
    texts = [part["failed"] for part in by_rank[1]]
    assert texts[0] == texts[1]
    assert "in all 8 rollouts" in texts[0] and "no database for rollout 0" in texts[0]

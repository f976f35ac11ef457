"""Groups without signal give way to groups of further prompts: what is asked for, trained, logged and saved."""

import json
import re
import signal
from collections import Counter

import pytest
import torch
from project import json_lines
from refill_run import DEAD, make

from mt_grpo.base.errors import RunError, RunStopped
from mt_grpo.generation.in_process import InProcessBackend
from mt_grpo.rollout import Rollout
from mt_grpo.training.batch import Batch
from mt_grpo.training.rewards import RewardFunctions
from mt_grpo_trainer import RewardTable


def column(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


@pytest.mark.contract("refill_groups")
def test_what_a_step_asks_for_and_trains(random_model, tmp_path):
    """By hand: of the twelve prompts 1, 2, 3 and 8 have no signal; a step may ask for four groups beside its two."""
    trainer = make(random_model, tmp_path)
    trainer.train()
    assert trainer.trained == {0: [0, 4], 1: [5, 6], 2: [7, 9], 3: [10, 11], 4: [0, 4]}  # then the next pass
    assert trainer.asked == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4]
    assert trainer.seen == [[0, 1], [2], [3], [4], [5, 6], [7, 8], [9], [10, 11], [0, 1], [2], [3], [4]]
    assert column(trainer, "refill/groups_dropped") == pytest.approx([3 / 5, 0, 1 / 3, 0, 3 / 5])
    assert column(trainer, "refill/rounds") == [3, 0, 1, 0, 3]
    assert column(trainer, "refill/data_passes") == pytest.approx([5 / 12, 7 / 12, 10 / 12, 1, 17 / 12])
    assert column(trainer, "reward") == [0.5] * 5  # of what is trained
    assert column(trainer, "refill/outcome_of_all_sampled") == pytest.approx(
        [(2 * 0.5 + 3 * 0.25) / 5, 0.5, (2 * 0.5 + 0.25) / 3, 0.5, (2 * 0.5 + 3 * 0.25) / 5]
    )
    assert column(trainer, "credit/frac_groups_without_signal") == [0.0] * 5
    assert column(trainer, "epoch")[:5] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6])  # TRL's: of its batches


def test_what_is_dropped_is_logged_counted_and_closed(random_model, tmp_path):
    trainer, closed = make(random_model, tmp_path, max_steps=1), []
    close = trainer.env.close

    def noted(rollouts=None):
        closed.append([rollout.row["number"] for rollout in rollouts or []])
        return close(rollouts)

    trainer.env.close = noted
    trainer.train()
    assert [each for each in closed if each] == [[1, 1], [2, 2], [3, 3], [0, 0, 4, 4]]
    rows = json_lines(tmp_path / "rollouts.rank0.jsonl")
    number = [int(re.search(r"\d+", row["messages"][0]["content"])[0]) for row in rows]
    assert [row["mode"] for row in rows] == ["dropped"] * 6 + ["train"] * 4
    assert number == [1, 1, 2, 2, 3, 3, 0, 0, 4, 4]
    assert [row["reward"] for row in rows] == [0.25] * 6 + [0.0, 1.0] * 2
    assert [row["group"] for row in rows] == [1] * 6 + [0, 0, 1, 1] and {row["batch_size"] for row in rows} == {4}
    high = 0.5 / (0.5**0.5 + 1e-4)
    assert [a for row in rows for a in row["turn_advantages"]] == pytest.approx([0.0] * 6 + [-high, high] * 2)
    assert [turn["num_trained"] for row in rows[:6] for turn in row["turns"]] == [0] * 6
    assert [row["outcome_advantage"] for row in rows] == pytest.approx([0.0] * 6 + [-high, high] * 2)
    sampled = sum(row["num_prompt_tokens"] + row["num_tokens"] for row in rows)
    assert column(trainer, "num_tokens") == [sampled]
    table = trainer._logs  # TRL's table of completions has a row per rollout that is trained
    assert list(table["extra"]["said"]) == [f"<answer>{n} {i}</answer>" for n in (0, 4) for i in (0, 1)]
    assert list(table["extra"]["first"]) == ["<answer>0 0</answer>", "<answer>0 1</answer>", None, None]
    assert [prompt[0]["content"] for prompt in table["prompt"]] == [f"What is {n}?" for n in (0, 0, 4, 4)]


def test_a_batch_that_has_no_signal_is_trained_as_it_is(random_model, tmp_path, caplog):
    """The bound counts groups: of 2 further ones both prompts' groups may take one place twice. It is said once."""
    trainer = make(random_model, tmp_path, dead=set(range(12)), max_steps=2, refill_groups=1)
    trainer.train()
    assert trainer.asked == [0, 1, 2, 3, 4, 5, 6, 7] and trainer.trained == {0: [2, 3], 1: [6, 7]}
    assert column(trainer, "refill/groups_dropped") == [0.5] * 2 and column(trainer, "grad_norm") == [0.0] * 2
    (said,) = [r.getMessage() for r in caplog.records if "refill_groups" in r.getMessage()]
    assert said.startswith("Step 0: refill_groups: none of 4 groups")


def test_the_last_round_replaces_as_many_as_are_left(random_model, tmp_path):
    """Three places, three further groups: two for 0 and 1, one for 3, and 4 stays."""
    trainer = make(random_model, tmp_path, {0, 1, 3, 4}, per_device_train_batch_size=6, max_steps=1, refill_groups=1)
    trainer.train()
    assert trainer.asked == [0, 1, 2, 3, 4, 5] and trainer.trained == {0: [5, 4, 2]}
    assert column(trainer, "credit/frac_groups_without_signal") == pytest.approx([1 / 3])


def test_the_metrics_of_conversations_are_of_all_that_was_sampled(random_model, tmp_path):
    """An environment that fails for a prompt is seen, although its group is dropped."""

    class Fails:
        def reset(self, number, **kwargs):
            if number == 1:
                raise OSError("no such page")

    trainer = make(random_model, tmp_path, dead=set(), environment=Fails, max_steps=1, credit_assignment="mt_grpo")
    trainer.train()
    assert trainer.trained == {0: [0, 2]} and column(trainer, "refill/groups_dropped") == pytest.approx([1 / 3])
    assert column(trainer, "stop/environment_error") == pytest.approx([1 / 3])


@pytest.mark.parametrize("huge", [1, 2])
def test_equal_rewards_that_cannot_be_compared_are_not_replaced(random_model, tmp_path, huge):
    """Prompt 1 is in the first batch, 2 in what takes its place."""
    trainer = make(random_model, tmp_path, max_steps=1, huge=huge)
    with pytest.raises(RunError, match=r"add up to 1e\+25 .* At most 1e\+18 can be compared"):
        trainer.train()
    assert trainer.asked[-1] == huge and trainer.trained == {}


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_stop_costs_no_prompt_and_asks_for_none_twice(random_model, tmp_path, stop):
    """Two passes to a batch, so that a stop may lie inside one, whose groups are then sampled again."""
    whole = make(random_model, tmp_path / "whole", num_iterations=2, max_steps=8)
    whole.train()
    assert whole.trained == {
        0: [0, 4], 1: [0, 4], 2: [5, 6], 3: [5, 6], 4: [7, 9], 5: [7, 9], 6: [10, 11], 7: [10, 11]
    }  # fmt: skip
    first, second = (
        make(random_model, tmp_path / "run", num_iterations=2, max_steps=8, save_strategy="steps", save_steps=100)
        for _ in range(2)
    )
    first.stops_before = stop
    with pytest.raises(RunStopped):
        first.train()
    checkpoint = first.save_where_it_stopped().rpartition(" ")[2]
    second.train(checkpoint)
    assert first.trained | second.trained == whole.trained
    inside = stop % 2 == 1  # the batch's own prompts are asked for again, those that it dropped are not
    again = first.trained[stop - 1] if inside else []
    batch = [0, 1, 2, 3, 4] if stop <= 2 else [0, 1, 2, 3, 4, 5, 6]
    assert first.asked == batch and second.asked == again + list(range(len(batch), 12))


def test_a_stop_inside_a_batch_loses_nothing_that_is_in_flight(random_model, tmp_path):
    """With `late_groups: admit`: the batch and what is in flight for later ones are in the checkpoint."""

    def ahead():
        changes = dict(num_iterations=2, max_steps=8, prompts=24, save_strategy="steps", save_steps=100)
        trainer = make(random_model, tmp_path, **changes)
        trainer.args.max_staleness, trainer.args.late_groups = 1, "admit"  # the scripted policy needs no server
        return trainer

    first, second = ahead(), ahead()
    first.stops_before = 3
    with pytest.raises(RunStopped):
        first.train()
    second.train(first.save_where_it_stopped().rpartition(" ")[2])
    state = json.loads((tmp_path / "checkpoint-3/trainer_state.json").read_text())["stateful_callbacks"]["in_flight"]
    begun, both = state["prompts"], first.trained | second.trained
    assert begun[:2] == first.trained[2] == second.trained[3] and second.asked[: len(begun)] == begun
    assert len(begun) > 2 and {*first.asked} - {*begun, *first.trained[0]} <= DEAD
    assert first.asked + second.asked[len(begun) :] == list(range(len({*first.asked, *second.asked})))
    trained = [prompt for step in (0, 3, 4, 6) for prompt in both[step]]
    assert len({*trained} - DEAD) == 8 and all(both[step] == both[step + 1] for step in (0, 4, 6))


def test_a_stop_while_it_refills(random_model, tmp_path):
    """The batch is drawn anew, with all that it had asked for."""
    first, second = (make(random_model, tmp_path, save_strategy="steps", save_steps=100) for _ in range(2))
    score = first._score

    def stops(batch, fresh=None):
        if fresh is not None and first.state.global_step == 2:
            first._stop_signal = signal.SIGTERM
            first._stop_if_asked()
        score(batch, fresh)

    first._score = stops
    with pytest.raises(RunStopped):
        first.train()
    second.train(first.save_where_it_stopped().rpartition(" ")[2])
    assert first.asked == list(range(10)) and first.trained == {0: [0, 4], 1: [5, 6]}
    assert second.asked[:5] == [7, 8, 9, 10, 11] and second.trained == {2: [7, 9], 3: [10, 11], 4: [0, 4]}


def test_a_run_goes_on_without_it_where_it_stopped(random_model, tmp_path):
    first = make(random_model, tmp_path, save_strategy="steps", save_steps=1, max_steps=1)
    first.train()
    state = json.loads((tmp_path / "checkpoint-1/trainer_state.json").read_text())["stateful_callbacks"]["in_flight"]
    assert state == {"epoch": 0, "place": 5, "prompts": [], "endless": True, "passes": 0}
    without = make(random_model, tmp_path, refill_groups=0, max_steps=6)
    without.train(str(tmp_path / "checkpoint-1"))
    assert without.trained == {1: [5, 6], 2: [7, 8], 3: [9, 10], 4: [11, 0], 5: [1, 2]}
    anew = make(random_model, tmp_path, refill_groups=0, max_steps=2, ignore_data_skip=True)
    anew.train(str(tmp_path / "checkpoint-1"))
    assert anew.trained == {1: [0, 1]}


def test_a_run_that_began_without_it_goes_on_with_it(random_model, tmp_path):
    make(random_model, tmp_path, refill_groups=0, save_strategy="steps", save_steps=2, max_steps=2).train()
    trainer = make(random_model, tmp_path, max_steps=4)
    trainer.train(str(tmp_path / "checkpoint-2"))
    assert trainer.trained == {2: [4, 5], 3: [6, 7]} and trainer.asked == [4, 5, 6, 7]


def test_passes_have_orders_of_their_own(random_model, tmp_path):
    """Each prompt once in each pass, in the order that the epoch of that number has without the key."""
    plain = make(random_model, tmp_path / "plain", refill_groups=0, shuffle_dataset=True, max_steps=12)
    plain.train()
    trainer = make(random_model, tmp_path, shuffle_dataset=True, max_steps=9)
    trainer.train()
    assert trainer.asked[:24] == plain.asked and plain.asked[:12] != plain.asked[12:]
    assert Counter(trainer.asked[:12]) == Counter(trainer.asked[12:24]) == Counter(range(12))


def test_an_evaluation_drops_nothing(random_model, tmp_path):
    trainer = make(random_model, tmp_path, max_steps=1)
    trainer.model.eval()
    rows = [trainer.train_dataset[n] for n in (1, 1, 2, 2)]
    trainer._generate_and_score_completions(rows)
    assert trainer.asked == [1, 2] and trainer.seen == [[1, 2]]


@pytest.mark.parametrize("masks, moves", [(False, [False, True]), (True, [False, False])])
def test_what_is_out_of_the_loss_is_no_signal(random_model, tmp_path, masks, moves):
    """Turn 1 of rollout 1 has no trained tokens; rollouts 2 and 3 were cut off."""
    trainer = make(random_model, tmp_path, mask_truncated_completions=masks)
    batch = Batch([], 2, truncated=[False, False, True, True])
    batch.rewards = RewardTable(
        outcome=torch.tensor([1.0, 1.0, 0.0, 1.0]), rollout_turn=torch.full((4,), torch.nan),
        turn=torch.full((4, 2), torch.nan), has_observation=torch.zeros(4, 2).bool(), sampled=torch.ones(4, 2).bool(),
        state=torch.zeros(4, 2).long(), num_tokens=torch.tensor([[3, 3], [3, 0], [3, 3], [3, 3]]),
    )  # fmt: skip
    assert trainer._without_signal(batch).tolist() == [not moved for moved in moves]
    batch.rewards.turn[:2, 1] = torch.tensor([1.0, 0.0])  # credit of turns that one of them does not train
    trainer.args.credit_assignment = "mt_grpo"
    batch.rewards.has_observation[:, 0] = True
    assert not trainer._without_signal(batch)[0]
    batch.rewards.num_tokens[0, 1] = 0
    assert trainer._without_signal(batch)[0]


def test_a_rank_without_a_place_to_fill_takes_part_once(random_model, tmp_path):
    """Generation of a sharded model is collective: each call of `any_rank` meets one of every other rank."""
    trainer, asked = make(random_model, tmp_path), []
    trainer.llm = InProcessBackend(None, None, any_rank=lambda flag: asked.append(flag) or flag)
    rows = [trainer.train_dataset[0]] * 4
    assert trainer._start_rollouts(rows, []).wait() == [] and asked == [False]
    trainer.env.max_model_len = 1
    trainer.model.train()
    with pytest.raises(ValueError, match="fills? the (model's )?context"):
        trainer._start_rollouts(rows, [0, 1])
    assert asked == [False]  # ranks meet behind it, before any of them samples


def test_a_column_of_another_length_has_no_places():
    def short(prompts, log_extra, **kwargs):
        log_extra("said", [1])
        return [0.0] * len(prompts)

    batch = Batch([{"prompt": []}] * 3, 1, rollouts=[Rollout([], []) for _ in range(3)])
    columns = {"trainer_state": None, "log_extra": batch.add_extra, "log_metric": print}
    with pytest.raises(ValueError, match="got 1 values, expected one for each of 2"):
        RewardFunctions([short], [1.0], 0).score(batch, columns, 60.0, torch.device("cpu"), [False, True, True])

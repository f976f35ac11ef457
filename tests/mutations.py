"""Faults put into the code on purpose. Each one must make the test that is named beside it fail.

    bash scripts/test.sh --mutations                 # all of them, two at a time
    bash scripts/test.sh --mutations columns paused  # those whose names contain one of the words

Every mutation is applied to a fresh copy of the tracked files. The named tests must pass on a copy without a mutation,
and fail (not: fail to be collected) on the copy with it. tests/test_mutations.py holds that every anchor still stands
in its file exactly once, so that a mutation cannot rot unnoticed.
"""

# Anchors stand as in the code, however long they are.
# ruff: noqa: E501

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import warm_python

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = "mt_grpo_trainer.py"
TIMEOUT = 900.0  # seconds that one mutation's tests may take; a hang counts as noticed only where the test says so


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Args:
        name: What is wrong then, as a short phrase.
        file: The file that is changed, relative to the project's root.
        old: Text that stands exactly once in the file.
        new: What takes its place.
        test: The pytest node ids that must notice it, separated by blanks: at least one of them fails.
    """

    name: str
    file: str
    old: str
    new: str
    test: str


BATCH = "tests/test_batch.py::test_a_batch_is_what_was_written_by_hand"
RANKS = "tests/test_distributed.py::test_two_ranks_give_what_was_written_by_hand"
TRUNCATED = "tests/test_batch.py::test_a_rollout_is_truncated_where_its_stop_reason_says_so"
END_OF_TURN = "tests/test_batch.py::test_a_turn_ends_where_the_chat_template_ends_it"
KEEPER, LAUNCHER = "scripts/keeper.py", "scripts/train.py"
KILLED_LAUNCH = "tests/test_scripts.py::test_a_killed_launch_leaves_nothing_that_is_deaf_or_hidden"
KEEPER_LOST = "tests/test_scripts.py::test_a_launch_outlives_its_keeper_and_ignores_what_nohup_ignores"
ODD_LOCK = "tests/test_scripts.py::test_a_port_with_an_odd_lock_file_is_passed_over"
COPIES = "tests/test_batch.py::test_a_reward_that_changes_its_arguments_changes_nothing_else"

CUT = "tests/test_records.py::test_a_cut_history_trains_as_a_whole_one"

REWARDS_AND_CREDIT: list[Mutation] = [
    Mutation(
        "records: the loss is divided by the tokens of first records only",
        "mt_grpo/records.py",
        'num_items = batch["num_items_in_batch"]',
        'num_items = (batch["completion_mask"] * batch["tool_mask"]).sum() * args.steps_per_generation',
        f"{CUT}[one-dapo]",
    ),
    Mutation(
        "records: the turns of a further one are numbered from 0",
        "mt_grpo/tensors.py",
        "for k, turn in zip(record.owners, record.turns):",
        "for k, turn in enumerate(record.turns):",
        "tests/test_records.py::test_every_sampled_token_is_trained_once_with_its_turns_advantage",
    ),
    Mutation(
        "records: rows that fill up a rank's last pass are trained",
        "mt_grpo/records.py",
        "dummy = {key: torch.zeros_like(value) for key, value in row.items()}",
        "dummy = {key: value.clone() for key, value in row.items()}",
        "tests/test_records.py::test_passes_are_as_many_on_all_ranks",
    ),
    Mutation(
        "records: ranks exchange gradients after each pass",
        "mt_grpo/records.py",
        "state._set_sync_gradients(False)",
        "state._set_sync_gradients(True)",
        "tests/test_records.py::test_ranks_exchange_gradients_once",
    ),
    Mutation(
        "records: the last pass goes backward twice",
        "mt_grpo/records.py",
        "for each in others:",
        "for each in passes:",
        f"{CUT}[one-dapo]",
    ),
    Mutation(
        "records: grpo's mean is over records, not rollouts",
        "mt_grpo/records.py",
        "weight = max_completion_length / max(1, num_trained(rows))",
        "weight = max_completion_length / max(1, num_trained(rows[:1]))",
        f"{CUT}[one-grpo]",
    ),
    Mutation(
        "records: the router's loss counts in each pass",
        "mt_grpo/records.py",
        "trainer.router_aux_loss_coef /= sum(each.scale for each in passes)",
        "trainer.router_aux_loss_coef /= 1.0",
        "tests/test_records.py::test_the_loss_of_a_router_counts_once",
    ),
    Mutation(
        "records: a rollout whose environment failed is in its group's mean",
        SCRIPT,
        "outcome=outcome.masked_fill(torch.tensor(self._failed, device=device), NAN)",
        "outcome=outcome",
        "tests/test_records.py::test_a_failed_rollout_is_in_nobodys_statistics_without_outcomes",
    ),
    Mutation(
        "records: a rollout whose environment failed is trained on",
        "mt_grpo/records.py",
        "records = [] if rollout.failed else [r",
        "records = [r",
        "tests/test_records.py::test_a_failed_rollout_is_in_nobodys_statistics",
    ),
    Mutation(
        "the recipe's choices of credit_assignment are written out, and a fork's estimator is none",
        SCRIPT,
        '"credit_assignment": tuple(CREDIT_ASSIGNMENTS)}',
        '"credit_assignment": ("outcome", "merged", "mt_grpo", "turn_return", "gigpo", "turn_credit")}',
        "tests/test_fork.py::test_the_estimator_of_the_page_trains",
    ),
    Mutation(
        "columns reach rewards in reversed order",
        SCRIPT,
        "columns = {key: [row[key] for row in inputs] for key",
        "columns = {key: [row[key] for row in inputs[::-1]] for key",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "columns reach rewards in reversed order, in evaluation",
        SCRIPT,
        "columns = {key: [row[key] for row in inputs] for key",
        "columns = {key: [row[key] for row in inputs[:: 1 if self.model.training else -1]] for key",
        "tests/test_batch.py::test_rollouts_are_graded_by_their_own_rows",
    ),
    Mutation(
        "prompts reach rewards in reversed order",
        SCRIPT,
        "for rollout, prompt in zip(self._rollouts, prompts)]",
        "for rollout, prompt in zip(self._rollouts, prompts[::-1])]",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "turns reach rewards in reversed order",
        SCRIPT,
        '"rollout_turns": [rollout.turns for rollout in self._rollouts], "trainer_state"',
        '"rollout_turns": [rollout.turns for rollout in self._rollouts[::-1]], "trainer_state"',
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "completions are trained on behind other prompts",
        "mt_grpo/records.py",
        "[record.prompt_ids or [pad_id] for record in records],",
        "[record.prompt_ids or [pad_id] for record in records[::-1]],",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "restarted rollouts take each other's places",
        SCRIPT,
        "for i, rollout in zip(indices, rollouts):",
        "for i, rollout in zip(indices[::-1], rollouts):",
        "tests/test_batch.py::test_rollouts_are_graded_by_their_own_rows",
    ),
    Mutation(
        "restarted rollouts get the first prompts",
        SCRIPT,
        "chosen = [rows[i] for i in indices]",
        "chosen = rows[: len(indices)]",
        f"{BATCH}[turn_return]",
    ),
    Mutation(
        "a rollout's index is that within its rank",
        SCRIPT,
        "rollout.index = self.accelerator.process_index * len(rows) + i",
        "rollout.index = i",
        RANKS,
    ),
    Mutation(
        "a turn's None is 0",
        "mt_grpo/scoring.py",
        "[[NAN if v is None else float(v) for v in row] for row in rows]",
        "[[0.0 if v is None else float(v) for v in row] for row in rows]",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "a rollout's None is 0",
        "mt_grpo/scoring.py",
        "torch.tensor([NAN if isinstance(v, missing) else float(v) for v in column])",
        "torch.tensor([NAN if isinstance(v, (list, tuple)) else float(v or 0) for v in column])",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "an outcome of None is 0",
        SCRIPT,
        "outcome = nansum(outcomes * outcome_weights, 1)",
        "outcome = (outcomes * outcome_weights).nansum(1)",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "a turn reward per rollout of None is 0",
        SCRIPT,
        "rollout_turn=nansum(whole[:, : self.num_turn_funcs] * turn_weights, 1)",
        "rollout_turn=(whole[:, : self.num_turn_funcs] * turn_weights).nansum(1)",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "outcome weights are ignored",
        SCRIPT,
        "outcome = nansum(outcomes * outcome_weights, 1)",
        "outcome = nansum(outcomes, 1)",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "turn weights are ignored",
        SCRIPT,
        "turn=nansum(per_turn * turn_weights, 2)",
        "turn=nansum(per_turn, 2)",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "turn weights are ignored where a reward is per rollout",
        SCRIPT,
        "rollout_turn=nansum(whole[:, : self.num_turn_funcs] * turn_weights, 1)",
        "rollout_turn=nansum(whole[:, : self.num_turn_funcs], 1)",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "turn rewards are shifted by one turn",
        SCRIPT,
        "turn=nansum(per_turn * turn_weights, 2)",
        "turn=nansum(per_turn * turn_weights, 2).roll(1, 1)",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "a call without a result counts as observed",
        "mt_grpo/scoring.py",
        "has_observation = [[turn.observation is not None for",
        "has_observation = [[turn.tool_call is not None for",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "a turn that was not sampled counts in the returns",
        "mt_grpo/scoring.py",
        "[[True] * len(row) for row in has_observation], num_turns, False, torch.bool)",
        "[[True] * len(row) for row in has_observation], num_turns, True, torch.bool)",
        f"{BATCH}[turn_return]",
    ),
    Mutation(
        "a rollout without outcome is in the baseline",
        SCRIPT,
        "turn=rewards.turn.where(~missing, NAN),",
        "turn=rewards.turn,",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "the number of turns is this rank's alone",
        SCRIPT,
        "num_turns = max(1, int(self.accelerator.gather(num_turns).max()))",
        "num_turns = int(num_turns.max())",
        RANKS,
    ),
    Mutation(
        "advantages are those of the first rank",
        SCRIPT,
        "first = self.accelerator.process_index * len(inputs)",
        "first = 0",
        RANKS,
    ),
    Mutation(
        "the log has the first rank's rewards",
        "mt_grpo/run_log.py",
        "mine = slice(rank * len(rollouts), rank * len(rollouts) + count)",
        "mine = slice(0, count)",
        RANKS,
    ),
    Mutation(
        "the log has the answer of another row",
        "mt_grpo/run_log.py",
        '"answer": row.get("answer")',
        '"answer": inputs[0].get("answer")',
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "logged turn rewards are a mean",
        SCRIPT,
        "sums = nansum(per_turn, 1)",
        "sums = per_turn.nanmean(1)",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "groups in evaluation are as large as in training",
        SCRIPT,
        "group_size, args = self.num_generations if self.model.training else self.num_generations_eval, self.args",
        "group_size, args = self.num_generations, self.args",
        f"{BATCH}[evaluation]",
    ),
    Mutation(
        "scale_rewards is ignored",
        SCRIPT,
        "self.turn_advantage_coef, self.scale_rewards,\n            args",
        'self.turn_advantage_coef, "group",\n            args',
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "scale_rewards is always none",
        SCRIPT,
        "self.turn_advantage_coef, self.scale_rewards,\n            args",
        'self.turn_advantage_coef, "none",\n            args',
        f"{BATCH}[outcome]",
    ),
    Mutation(
        "turn_advantage_coef is ignored",
        SCRIPT,
        "group_size, self.turn_advantage_coef, self.scale_rewards,",
        "group_size, 1.0, self.scale_rewards,",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "turn_discount is ignored",
        SCRIPT,
        "            args.turn_discount,\n        )  # fmt: skip\n        first",
        "            1.0,\n        )  # fmt: skip\n        first",
        f"{BATCH}[turn_return]",
    ),
    Mutation(
        "credit goes to the turn before",
        "mt_grpo/tensors.py",
        "owners += (k, -1)",
        "owners += (max(k - 1, 0), -1)",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "results have the credit of their calls",
        "mt_grpo/tensors.py",
        "owners += (k, -1)",
        "owners += (k, k)",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "results of tools are trained on",
        "mt_grpo/rollout.py",
        "for part in (t.per_token(int(t.trained), 0), [0] * len(t.observation_ids))",
        "for part in (t.per_token(int(t.trained), 0), [1] * len(t.observation_ids))",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "logprobs leave out the results",
        "mt_grpo/rollout.py",
        "(t.logprobs, [0.0] * len(t.observation_ids))",
        "(t.logprobs,)",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "a rollout that fills the context is no truncated one",
        SCRIPT,
        "truncated = (StopReason.MAX_TOKENS, StopReason.CONTEXT_LENGTH)",
        "truncated = (StopReason.MAX_TOKENS,)",
        TRUNCATED,
    ),
    Mutation(
        "TRL judges truncation by the last id",
        SCRIPT,
        "        self.mask_truncated_completions = False\n",
        "",
        TRUNCATED,
    ),
    Mutation(
        "clipped_ratio is judged by the last id",
        SCRIPT,
        "        self._log_metrics({**metrics, **check_rollouts(rollouts, self.env, self.args)})\n",
        '        metrics["completions/clipped_ratio"] = sum(r.completion_ids[-1] not in self.eos_token_ids for r in rollouts) / len(rollouts)\n        self._log_metrics(metrics)\n',
        TRUNCATED,
    ),
    Mutation(
        "clipped_ratio leaves out a full context",
        "mt_grpo/run_log.py",
        " | (stop == reasons.index(StopReason.CONTEXT_LENGTH))",
        "",
        TRUNCATED,
    ),
    Mutation(
        "the template's end of turn is not in eos_token_ids",
        SCRIPT,
        "self.eos_token_ids = env.end_of_turn_ids(tokenizer)",
        "self.eos_token_ids = sorted(self.eos_token_ids)",
        END_OF_TURN,
    ),
    Mutation(
        "the template's end of turn is not in generation_config",
        SCRIPT,
        'self.generation_config.eos_token_id = self.generation_kwargs["eos_token_id"] = self.eos_token_ids',
        "pass",
        END_OF_TURN,
    ),
    Mutation(
        "the template's end of turn is not in stop_token_ids",
        SCRIPT,
        '"stop_token_ids": list(self.eos_token_ids),\n            **(args',
        '"stop_token_ids": [tokenizer.eos_token_id],\n            **(args',
        END_OF_TURN,
    ),
    Mutation(
        "a sample that ends by the template's end counts as cut",
        SCRIPT,
        "lambda i: i in self.eos_token_ids",
        "lambda i: i == tokenizer.eos_token_id",
        END_OF_TURN,
    ),
    Mutation(
        "evaluation is on the train split",
        "mt_grpo/data.py",
        "train_rows, load_rows(name, script_args.dataset_test_split,",
        "train_rows, load_rows(name, script_args.dataset_train_split,",
        "tests/test_batch.py::test_evaluation_is_by_the_test_file",
    ),
    Mutation(
        "every split of a folder is train.jsonl",
        "mt_grpo/data.py",
        'Path(name) / f"{split}.jsonl"',
        'Path(name) / "train.jsonl"',
        "tests/test_batch.py::test_evaluation_is_by_the_test_file",
    ),
    Mutation(
        "generated test problems are of the train split",
        "mt_grpo/data.py",
        'seed=0 if split == "train" else 1, split=split)',
        'seed=0 if split == "train" else 1, split="train")',
        "tests/test_batch.py::test_evaluation_is_by_generated_problems_that_are_held_out",
    ),
    Mutation(
        "generated train problems are of both splits",
        "mt_grpo/data.py",
        'if (zlib.crc32(expression.encode()) % 10 == 0) == (split == "test"):',
        'if zlib.crc32(expression.encode()) % 10 == 0 or split == "train":',
        "tests/test_batch.py::test_evaluation_is_by_generated_problems_that_are_held_out tests/test_batch.py::test_no_generated_problem_is_in_both_splits[make_arithmetic]",
    ),
    Mutation(
        "generated chains are of both splits",
        "mt_grpo/data.py",
        'if held_out == (split == "test") and all',
        'if (held_out or split == "train") and all',
        "tests/test_batch.py::test_no_generated_problem_is_in_both_splits[make_chain]",
    ),
    Mutation(
        "rewards in a thread get what is trained",
        "mt_grpo/scoring.py",
        "return func(**own_copy(kwargs))",
        "return func(**kwargs)",
        f"{COPIES}[mt_grpo]",
    ),
    Mutation(
        "async rewards get what is trained",
        "mt_grpo/scoring.py",
        "run_tool(func, own_copy(columns), timeout)",
        "run_tool(func, columns, timeout)",
        f"{COPIES}[mt_grpo]",
    ),
    Mutation(
        "turns that rewards get are not copied",
        "mt_grpo/scoring.py",
        "COPIED = {list, tuple, dict, Turn, ToolCall}",
        "COPIED = {list, tuple, dict, ToolCall}",
        f"{COPIES}[mt_grpo]",
    ),
    Mutation(
        "objects that rewards get are copied",
        "mt_grpo/scoring.py",
        "        return copied\n    return value\n",
        "        return copied\n    return copy.copy(value)\n",
        "tests/test_batch.py::test_reward_functions_get_copies_of_plain_data_and_other_objects_themselves",
    ),
    Mutation(
        "rewards of another scale per turn index and group",
        SCRIPT,
        "per_turn = rewards.norm(rewards.turn.where(rewards.observed, NAN))",
        "per_turn = rewards.norm(rewards.turn)",
        "tests/test_credit.py::test_the_last_turn_gets_no_turn_advantage_of_its_own",
    ),
    Mutation(
        "a reward per rollout goes to the turn after the result too",
        SCRIPT,
        "self.observed.int().cumsum(1) - self.observed.int() == 0",
        "self.observed.int().cumsum(1) - self.observed.int() <= 1",
        "tests/test_credit.py::test_a_reward_per_rollout_goes_to_the_first_observed_turn_only",
    ),
    Mutation(
        "the table of completions has TRL's advantages",
        SCRIPT,
        "        logged.extend(self.accelerator.gather(mean_advantages).tolist())\n",
        "        logged.extend([0.0] * len(advantages))\n",
        "tests/test_batch.py::test_the_table_of_completions_has_the_advantages_that_are_trained",
    ),
    Mutation(
        "samples of a batch are given to other conversations",
        "mt_grpo/in_process.py",
        "in zip(batch, generations, strict=True):\n            if not future",
        "in zip(batch, generations[::-1], strict=True):\n            if not future",
        "tests/test_batch.py::test_a_conversation_gets_its_own_samples",
    ),
    Mutation(
        "a sample is not cut to its own budget",
        "mt_grpo/in_process.py",
        "ids = list(token_ids[i][:max_tokens])",
        "ids = list(token_ids[i])",
        "tests/test_batch.py::test_a_conversation_gets_its_own_samples",
    ),
    Mutation(
        "the chain model gets a prompt that it never saw",
        "hf_recipes/tiny/chain.yaml",
        "system_prompt: Use the calculator for each step",
        "system_prompt: Use the tool for each step",
        "tests/test_chain.py::test_the_bundled_models_are_as_good_as_the_benchmark_says",
    ),
    Mutation(
        "the Hermes calculator model gets a prompt that it never saw",
        "hf_recipes/tiny/calculator-hermes.yaml",
        "system_prompt: Use the calculator",
        "system_prompt: Use the tool",
        "tests/test_tiny_models.py::test_what_is_imitated_is_a_rollout",
    ),
    Mutation(
        "the warm start imitates two ends of a turn",
        "scripts/build_tiny_model.py",
        "tool_format.suffix_ids([], group, ids)",
        "tool_format.suffix_ids([], group, [])",
        "tests/test_tiny_models.py::test_what_is_imitated_is_a_rollout",
    ),
    Mutation(
        "the warm start imitates what the environment writes",
        "scripts/build_tiny_model.py",
        "labels += piece if said else [-100] * len(piece)",
        "labels += piece",
        "tests/test_tiny_models.py::test_what_is_imitated_is_a_rollout",
    ),
    Mutation(
        "no turn of the warm start has two calls",
        "scripts/build_tiny_model.py",
        "rng.random() < writing.second_call",
        "rng.random() > 1.0",
        "tests/test_tiny_models.py::test_a_warm_start_has_every_kind_of_mistake",
    ),
    Mutation(
        "the Hermes model's template gives each result a message of its own",
        "hf_recipes/tiny/calculator-hermes-model/chat_template.jinja",
        "loop.last or messages[loop.index0 + 1].role != 'tool'",
        "true",
        "tests/test_tiny_models.py::test_the_text_of_a_conversation_with_two_calls_in_a_turn",
    ),
    Mutation(
        "rewards: a call without a result is no attempt",
        "rewards/calculator_reward.py",
        "zip_longest(turn.calls, turn.results)",
        "zip(turn.calls, turn.results)",
        "tests/test_rewards.py::test_several_calls_in_a_turn",
    ),
    Mutation(
        "rewards: what a failed tool said is a result",
        "rewards/calculator_reward.py",
        "call.error or result.error or",
        "call.error or",
        "tests/test_rewards.py::test_several_calls_in_a_turn",
    ),
    Mutation(
        "rewards: a malformed call succeeds if it got a result",
        "rewards/calculator_reward.py",
        "call.error or result.error",
        "result.error",
        "tests/test_rewards.py::test_a_malformed_call_fails_whatever_it_got",
    ),
    Mutation(
        "rewards: only the first result of a turn is looked at",
        "rewards/triviaqa_reward.py",
        "zip_longest(turn.calls, turn.results)",
        "zip_longest(turn.calls[:1], turn.results[:1])",
        "tests/test_rewards.py::test_several_calls_in_a_turn",
    ),
    Mutation(
        "rewards: a tool that says Error succeeded",
        "rewards/gsm8k_reward.py",
        ' or result.text.lstrip().startswith("Error:")',
        "",
        "tests/test_rewards.py::test_tool_calls_written_by_hand_and_parsed",
    ),
    Mutation(
        "rewards: an earlier turn's answer counts",
        "rewards/calculator_reward.py",
        "return turns[-1].answer if turns else None",
        "return next((turn.answer for turn in turns if turn.answer), None)",
        "tests/test_rewards.py::test_exact_match_reads_the_answer_that_counts",
    ),
    Mutation(
        "rewards: a turn that calls is measured as one that answers",
        "rewards/triviaqa_reward.py",
        '"tool" if turn.calls else "answer"',
        '"answer"',
        "tests/test_rewards.py::test_format",
    ),
    Mutation(
        "gsm8k: words before the number are passed over",
        "rewards/gsm8k_reward.py",
        "_AMOUNT.fullmatch(",
        "_AMOUNT.search(",
        "tests/test_rewards.py::test_numbers",
    ),
    Mutation(
        "gsm8k: the first of two different boxes counts",
        "rewards/gsm8k_reward.py",
        "numbers[0] if numbers.count(numbers[0]) == len(numbers) else None",
        "numbers[0]",
        "tests/test_rewards.py::test_numbers",
    ),
    Mutation(
        "gsm8k: what follows the number is passed over",
        "rewards/gsm8k_reward.py",
        "fits = letters and",
        "fits = ",
        "tests/test_rewards.py::test_numbers",
    ),
    Mutation(
        "gsm8k: a million is a unit",
        "rewards/gsm8k_reward.py",
        " and _NO_UNITS.isdisjoint(words)",
        "",
        "tests/test_rewards.py::test_numbers",
    ),
    Mutation(
        "gsm8k: a sentence is a unit",
        "rewards/gsm8k_reward.py",
        " and len(words) <= 4",
        "",
        "tests/test_rewards.py::test_numbers",
    ),
    Mutation(
        "gsm8k: a minus is dropped",
        "rewards/gsm8k_reward.py",
        '"-" * ("-" in sign) + ',
        "",
        "tests/test_rewards.py::test_numbers",
    ),
    Mutation(
        "chain: only a turn's first call can be a right step",
        "rewards/chain_reward.py",
        "for result in turn.results:",
        "for result in turn.results[:1]:",
        "tests/test_chain.py::test_several_calls_in_a_turn",
    ),
    Mutation(
        "chain: a failed call can be a right step",
        "rewards/chain_reward.py",
        " and result.error is None",
        "",
        "tests/test_chain.py::test_several_calls_in_a_turn",
    ),
    Mutation(
        "chain: a call without a result is paid",
        "rewards/chain_reward.py",
        "(turn.error is None) if turn.results else",
        "(turn.error is None) if turn.calls else",
        "tests/test_chain.py::test_several_calls_in_a_turn",
    ),
    Mutation(
        "judge: what the environment said is not shown",
        "rewards/judge_reward.py",
        " or _messages(turn.messages)",
        "",
        "tests/test_judge_reward.py::test_several_results_and_the_environments_own_words_are_of_the_conversation",
    ),
]

SERVER_AND_WEIGHTS: list[Mutation] = [
    Mutation(
        "prefetched rollouts stay open behind a stop",
        "mt_grpo/resume.py",
        "                batch.cancel()\n",
        "                pass\n",
        "tests/test_trainer.py::test_a_stop_before_prefetched_rollouts_are_taken_cancels_them",
    ),
    Mutation(
        "an API key goes with NCCL",
        "mt_grpo/weight_transfer.py",
        'config == "nccl" and not self.server.sends_credentials else "disk"',
        'config == "nccl" else "disk"',
        "tests/test_client.py::test_the_way_of_weights_depends_on_device_server_and_key",
    ),
    Mutation(
        "pushes that a server ignores are not looked for",
        "mt_grpo/weight_sync.py",
        "        if self.num_syncs == 0:\n            self._check_that_pushes_arrive(version)\n",
        "",
        "tests/test_faults.py::test_a_server_with_other_weights_is_noticed_before_a_rollout",
    ),
    Mutation(
        "float32 logprobs may be 0.1 off",
        "mt_grpo/weight_sync.py",
        'return 1e-3 if self.model.dtype == torch.float32 and self._server_dtype == "float32" else 0.1',
        "return 0.1",
        "tests/test_faults.py::test_a_server_with_other_weights_is_noticed_before_a_rollout",
    ),
    Mutation(
        "no prefix cache is reset",
        "mt_grpo/weight_transfer.py",
        'answer = self.server.request("POST", "/reset_prefix_cache")\n',
        "answer = {}\n",
        "tests/test_faults.py::test_what_a_step_asks_its_server_for",
    ),
    Mutation(
        "no pause",
        "mt_grpo/weight_transfer.py",
        'self.server.request("POST", "/pause", timeout=self.server.request_timeout, params={"mode": "wait"})',
        "pass",
        "tests/test_faults.py::test_what_a_step_asks_its_server_for",
    ),
    Mutation(
        "neither pause nor reset",
        "mt_grpo/weight_transfer.py",
        'self.server.request("POST", "/pause", timeout=self.server.request_timeout, params={"mode": "wait"})\n            # A load that fails half-way leaves a version that nobody expects, so that nobody samples from it.\n            self.server.request("POST", "/update_weight_version", json={"new_version": f"loading-{version}"})\n            load()\n            answer = self.server.request("POST", "/reset_prefix_cache")\n',
        "load()\n            answer = {}\n",
        "tests/test_faults.py::test_keys_of_old_weights_do_not_outlive_a_push",
    ),
    Mutation(
        "a pause that aborts",
        "mt_grpo/weight_transfer.py",
        ', params={"mode": "wait"})',
        ")",
        "tests/test_faults.py::test_what_a_step_asks_its_server_for",
    ),
    Mutation(
        "no version while it loads",
        "mt_grpo/weight_transfer.py",
        'self.server.request("POST", "/update_weight_version", json={"new_version": f"loading-{version}"})',
        "pass",
        "tests/test_faults.py::test_a_push_that_ends_half_way_leaves_a_version_that_nobody_expects",
    ),
    Mutation(
        "a refused cache reset is taken as done",
        "mt_grpo/weight_transfer.py",
        'if answer.get("success") is False:',
        "if not answer:",
        "tests/test_faults.py::test_a_push_that_ends_half_way_leaves_a_version_that_nobody_expects",
    ),
    Mutation(
        "a push does not wait for what is in the air",
        SCRIPT,
        'self._on_all_ranks(self._prefetched.wait_until_over, "Rollouts")',
        'self._on_all_ranks(lambda: None, "Rollouts")',
        "tests/test_faults.py::test_overlapping_rollouts_are_one_step_behind",
    ),
    Mutation(
        "evaluations are sampled one push behind",
        SCRIPT,
        "        if self.weight_sync.pushed == version:\n",
        "        if self.weight_sync.pushed == version or not self.model.training:\n",
        "tests/test_faults.py::test_overlapping_rollouts_are_one_step_behind",
    ),
    Mutation(
        "rollouts of other prompts are taken",
        "mt_grpo/resume.py",
        'if self._prefetched.prompts != [row["prompt"] for row in rows]:',
        "if len(self._prefetched.prompts) != len(rows):",
        "tests/test_faults.py::test_rollouts_in_the_air_are_of_the_prompts_that_are_trained",
    ),
    Mutation(
        "versions are confirmed when the answer is there",
        "mt_grpo/vllm_server.py",
        "confirmed = asked",
        "confirmed = time.monotonic()",
        "tests/test_client.py::test_an_answer_proves_only_what_was_finished_when_it_was_asked_for",
    ),
    Mutation(
        "any version that begins so will do",
        "mt_grpo/vllm_server.py",
        "if held == version:\n",
        "if held is not None and held.startswith(version):\n",
        "tests/test_client.py::test_only_the_very_version_counts",
    ),
    Mutation(
        "a version that ends so will do",
        "mt_grpo/vllm_server.py",
        "if held == version:\n",
        "if held is not None and held.endswith(version):\n",
        "tests/test_client.py::test_only_the_very_version_counts",
    ),
    Mutation(
        "a server that lost its weights keeps its rollouts",
        "mt_grpo/vllm_server.py",
        "if held == version:\n",
        "if held is not None:\n",
        "tests/test_client.py::test_only_the_very_version_counts",
    ),
    Mutation(
        "ranks do not wait for the push",
        "mt_grpo/weight_sync.py",
        "        return on_main_process(push)\n",
        "        on_main_process(dict)\n        return push() if self.accelerator.is_main_process else {}\n",
        "tests/test_server.py::test_two_ranks_on_one_server",
    ),
    Mutation(
        "ranks expect versions of their own",
        SCRIPT,
        "self.client.instance = on_main_process(lambda: self.client.instance)",
        "on_main_process(dict)",
        "tests/test_server.py::test_two_ranks_on_one_server",
    ),
    Mutation(
        "a version has its name before its file is whole",
        "mt_grpo/weight_transfer.py",
        'folder.with_name(f"partial-{version}")',
        "folder",
        "tests/test_faults.py::test_what_has_a_versions_name_is_complete",
    ),
    Mutation(
        "the probe's norm stays in the policy",
        "mt_grpo/weights.py",
        "tensor = tensor * norm_scale",
        "tensor = tensor.mul_(norm_scale)",
        "tests/test_faults.py::test_what_a_step_asks_its_server_for",
    ),
    Mutation(
        "the probe's norm stays on the server",
        "mt_grpo/weight_sync.py",
        "seconds, every = self._push(version), self.check_every",
        "seconds, every = {}, self.check_every",
        "tests/test_faults.py::test_what_a_step_asks_its_server_for",
    ),
    Mutation(
        "tied names are dropped",
        "mt_grpo/weights.py",
        "for alias in (name, *sorted(self._tied.get(name, ()))):",
        "for alias in (name,):",
        "tests/test_trainer.py::test_weights_of_a_lora_are_exact_and_the_model_untouched",
    ),
    Mutation(
        "tied names are neither sent nor expected",
        "mt_grpo/weights.py",
        "named_parameters(remove_duplicate=False)",
        "named_parameters()",
        "tests/test_trainer.py::test_weights_of_a_lora_are_exact_and_the_model_untouched",
    ),
    Mutation(
        "lora is not merged",
        "mt_grpo/weights.py",
        "                merged.merge()\n",
        "",
        "tests/test_trainer.py::test_weights_of_a_lora_are_exact_and_the_model_untouched",
    ),
    Mutation(
        "missing weights are pushed without",
        "mt_grpo/weight_transfer.py",
        "        self._check_names(tensors.keys(), expected)\n        gathered = time.perf_counter()\n        folder = None\n",
        "        gathered = time.perf_counter()\n        folder = None\n",
        "tests/test_server.py::test_a_push_that_fails_changes_nothing",
    ),
    Mutation(
        "temperature is not sent",
        SCRIPT,
        '"temperature": self.temperature, "top_p": self.top_p',
        '"top_p": self.top_p',
        "tests/test_faults.py::test_what_a_step_asks_its_server_for",
    ),
    Mutation(
        "top_k is not sent",
        SCRIPT,
        '"top_k": self.top_k, "min_p"',
        '"min_p"',
        "tests/test_faults.py::test_what_a_step_asks_its_server_for",
    ),
    Mutation(
        "generation_kwargs are not sent",
        SCRIPT,
        '"stop_token_ids": list(self.eos_token_ids),\n            **(args.generation_kwargs or {}),',
        '"stop_token_ids": list(self.eos_token_ids),',
        "tests/test_faults.py::test_what_a_step_asks_its_server_for",
    ),
    Mutation(
        "unset fields take the model's own",
        "mt_grpo/sampling.py",
        '"top_k": 0, "min_p": 0.0, ',
        "",
        "tests/test_server.py::test_unset_sampling_fields_do_not_take_the_models_own",
    ),
    Mutation(
        "a changed prompt is accepted",
        "mt_grpo/server_errors.py",
        "if seen != num_prompt_tokens:",
        "if seen < num_prompt_tokens:",
        "tests/test_faults.py::test_a_fault_that_passes_costs_a_retry",
    ),
    Mutation(
        "an aborted sample is accepted",
        "mt_grpo/server_errors.py",
        'finish_reason not in ("stop", "length")',
        "not finish_reason",
        "tests/test_faults.py::test_a_fault_that_passes_costs_a_retry[aborted]",
    ),
    Mutation(
        "a NaN for a logprob is accepted",
        "mt_grpo/server_errors.py",
        "or not all(map(is_logprob, logprobs)):",
        "or not logprobs:",
        "tests/test_faults.py::test_a_fault_that_passes_costs_a_retry[NaN]",
    ),
    Mutation(
        "ids without all logprobs are accepted",
        "mt_grpo/server_errors.py",
        "if not 0 < counts[0] == counts[1] or",
        "if not 0 < counts[0] or",
        "tests/test_faults.py::test_a_fault_that_passes_costs_a_retry",
    ),
    Mutation(
        "settings of a server that came back are not compared",
        "mt_grpo/weight_sync.py",
        "if new_server:\n            self._check",
        "if False:\n            self._check",
        "tests/test_faults.py::test_a_server_that_comes_back_otherwise_ends_the_run",
    ),
    Mutation(
        "a time limit per byte",
        "mt_grpo/vllm_server.py",
        "ClientTimeout(total=timeout, sock_connect=10.0)",
        "ClientTimeout(total=None, sock_read=timeout, sock_connect=10.0)",
        "tests/test_client.py::test_an_answer_that_trickles_is_no_answer",
    ),
    Mutation(
        "a wait in silence",
        "mt_grpo/vllm_server.py",
        "if time.monotonic() - said >= self.NOTICE_SECONDS:",
        "if False:",
        "tests/test_client.py::test_a_wait_says_what_it_waits_for",
    ),
    Mutation(
        "a name that nobody knows is waited for",
        "mt_grpo/vllm_server.py",
        "if isinstance(error, never) and not self._reached:",
        "if False:",
        "tests/test_client.py::test_a_name_that_nobody_knows_is_not_waited_for",
    ),
    Mutation(
        "a name server that fails ends a run",
        "mt_grpo/vllm_server.py",
        "if isinstance(error, never) and not self._reached:",
        "if isinstance(error, never):",
        "tests/test_client.py::test_a_name_that_nobody_knows_is_not_waited_for",
    ),
    Mutation(
        "another service's answer is a traceback",
        "mt_grpo/vllm_server.py",
        "except (ValueError, LookupError, TypeError):",
        "except ValueError:",
        "tests/test_client.py::test_another_service_is_told_as_such",
    ),
    Mutation(
        "passwords are logged with the arguments",
        SCRIPT,
        "            args.vllm_server_base_url = client.base_url\n",
        "            pass\n",
        "tests/test_faults.py::test_what_a_step_asks_its_server_for",
    ),
    Mutation(
        "passwords are not sent",
        "mt_grpo/vllm_server.py",
        'f"Bearer {api_key}" if api_key else credentials',
        'f"Bearer {api_key}" if api_key else None',
        "tests/test_client.py::test_a_password_is_sent_and_not_shown",
    ),
    Mutation(
        "a lock follows links",
        "mt_grpo/locks.py",
        "flags | os.O_NOFOLLOW | os.O_NONBLOCK",
        "flags | os.O_NONBLOCK",
        "tests/test_client.py::test_an_output_lock_is_an_ordinary_file",
    ),
    Mutation(
        "a lock may be a FIFO",
        "mt_grpo/locks.py",
        "if not stat.S_ISREG(found.st_mode) or",
        "if",
        "tests/test_client.py::test_an_output_lock_is_an_ordinary_file",
    ),
    Mutation(
        "any user may read the weights in a place for all",
        "mt_grpo/weight_transfer.py",
        "if not root.stat().st_mode & stat.S_ISVTX:",
        "if root:",
        "tests/test_faults.py::test_what_others_put_beside_the_weights_is_left_alone",
    ),
    Mutation(
        "folders of dead runs stay",
        "mt_grpo/weight_transfer.py",
        "                    self._remove_if_dead(folder)",
        "                    pass",
        "tests/test_faults.py::test_what_others_put_beside_the_weights_is_left_alone",
    ),
    Mutation(
        "other users' folders are removed",
        "mt_grpo/weight_transfer.py",
        "and found.st_uid == os.geteuid():",
        ":",
        "tests/test_faults.py::test_what_others_put_beside_the_weights_is_left_alone",
    ),
]

SHORT_MEMORY = "tests/test_forks.py::test_what_a_short_memory_reads[xml]"
BAD_ENVIRONMENT = "tests/test_recipes.py::test_bad_environment"

CONVERSATION_AND_TOOLS: list[Mutation] = [
    Mutation(
        "forks: an environment that edits a history does not see the turn's results in it",
        SCRIPT,
        "turn.messages = self.result_messages(turn, tokenizer)[1]",
        "pass",
        SHORT_MEMORY,
    ),
    Mutation(
        "forks: a result that stays in an edited history loses its closing tag",
        SCRIPT,
        "[m if m in read else neutralise_prompt([m], tokenizer)[0] for m in history]",
        "neutralise_prompt(history, tokenizer)",
        SHORT_MEMORY,
    ),
    Mutation(
        "forks: results that nobody reads stay in a conversation that ended",
        SCRIPT,
        "turn.messages = []  # nobody reads them",
        "pass",
        "tests/test_environments.py::test_a_reply_can_stop",
    ),
    Mutation(
        "forks: a method of an environment takes the place of a function of its name",
        "mt_grpo/environments.py",
        "if tool.__name__ in tools:",
        "if False:",
        BAD_ENVIRONMENT,
    ),
    Mutation(
        "forks: an environment without any reward trains on nothing",
        "mt_grpo/scoring.py",
        "if may_give or any(",
        "if True or any(",
        BAD_ENVIRONMENT,
    ),
    Mutation(
        "forks: several calls of a turn are counted as one",
        "mt_grpo/run_log.py",
        "sum(len(t.calls) for t in r.turns), *num_errors(r),",
        "sum(bool(t.calls) for t in r.turns), *num_errors(r),",
        "tests/test_forks.py::test_hermes_and_parallel_calls",
    ),
    Mutation(
        "forks: a program in the sandbox reads the environment's secrets",
        "tools/sandbox.py",
        "cwd=self.folder, env={}, **files",
        "cwd=self.folder, **files",
        "tests/test_forks.py::test_what_a_sandbox_bounds",
    ),
    Mutation(
        "forks: an evaluated environment does not get its row",
        "scripts/evaluate.py",
        'env.start([row["prompt"] for row in with_prompts(rows)], rows=rows)',
        'env.start([row["prompt"] for row in with_prompts(rows)])',
        "tests/test_scripts.py::test_an_environment_is_evaluated",
    ),
    Mutation(
        "a format reads calls and answers inside thinking",
        "mt_grpo/chat_format.py",
        "        if start is None:\n            return Parsed(text, [], None, open_thinking=True)\n        return Parsed(text, *self.parse_text(text[start:], tools or {}))",
        "        return Parsed(text, *self.parse_text(text, tools or {}))",
        "tests/test_formats.py::test_tags_inside_thinking_mean_nothing",
    ),
    Mutation(
        "a format adds the end of turn to one that was sampled",
        "mt_grpo/chat_format.py",
        "        return ids[len(closing) :] if there else ids\n",
        "        return ids\n",
        "tests/test_formats.py::test_the_suffix_of_a_result_in_ids",
    ),
    Mutation(
        "an end of turn that is no special token ends no turn",
        "mt_grpo/chat_format.py",
        "if end < len(ids) and ids[end] in added else []",
        "if end < len(ids) and ids[end] in added and added[ids[end]].special else []",
        "tests/test_formats.py::test_the_templates_end_of_turn_ends_a_turn_special_or_not",
    ),
    Mutation(
        "a request that goes on in thinking stops at tags",
        "mt_grpo/chat_format.py",
        "return self.thinking[1:] if open_thinking else self.stops",
        "return self.stops",
        "tests/test_formats.py::test_after_a_stop_inside_thinking_only_its_close_stops",
    ),
    Mutation(
        "a template that loses results is taken",
        "mt_grpo/chat_format.py",
        "        if not all(text in suffix for text in texts):\n",
        "        if False:\n",
        "tests/test_formats.py::test_a_template_that_loses_tool_results_is_refused",
    ),
    Mutation(
        "an unclosed call takes the calls behind it",
        "mt_grpo/hermes.py",
        "read, start = [], following.start() if following else len(text)",
        "read, start = [], len(text)",
        "tests/test_formats.py::test_broken_calls_are_calls_with_an_error",
    ),
    Mutation(
        "a turn's last call takes the place of the others",
        "mt_grpo/hermes.py",
        "            calls += read or [",
        "            calls = read or [",
        "tests/test_formats.py::test_calls_of_a_family[qwen3]",
    ),
    Mutation(
        "results follow a stand-in without calls",
        "mt_grpo/hermes.py",
        "        if not results:\n            return super().suffix",
        "        if results is not None:\n            return super().suffix",
        "tests/test_formats.py::test_the_suffix_of_results_of_a_family[gemma4]",
    ),
    Mutation(
        "a number as text becomes a number",
        "mt_grpo/native.py",
        "    if takes_text(schema):\n",
        "    if False:\n",
        "tests/test_formats.py::test_values_without_quotes_are_typed_by_the_tool",
    ),
    Mutation(
        "sampled ids are encoded again from their text",
        SCRIPT,
        "turn = Turn(ids[:length], logprobs and",
        'turn = Turn(self._tokenizer(llm)(written.text(ids[:length]))["input_ids"], logprobs and',
        "tests/test_conversation.py::test_one_token_that_holds_more_than_the_tag_is_kept_whole",
    ),
    Mutation(
        "logprobs are not cut with their ids",
        SCRIPT,
        "logprobs and logprobs[:length]",
        "logprobs",
        "tests/test_conversation.py::test_one_token_that_holds_more_than_the_tag_is_kept_whole",
    ),
    Mutation(
        "the template's end of turn follows another one that was sampled",
        "mt_grpo/chat_format.py",
        "sampled[-1] in self.ends and closing and closing[-1] in self.ends | self._closing",
        "closing and sampled[-1] == closing[-1]",
        "tests/test_formats.py::test_another_end_than_the_templates_takes_its_place",
    ),
    Mutation(
        "an environment is not closed where the server dies",
        SCRIPT,
        "            self.close(states)\n",
        "            self.close([state for state in states if state.stop_reason])\n",
        "tests/test_environments.py::test_close_runs_where_the_server_dies",
    ),
    Mutation(
        "an environment is not closed after an error",
        "mt_grpo/environments.py",
        '        if hasattr(rollout.environment, "close"):\n',
        '        if hasattr(rollout.environment, "close") and rollout.error is None:\n',
        "tests/test_environments.py::test_a_failing_environment_ends_its_rollout",
    ),
    Mutation(
        "a failed rollout's reward is kept",
        "mt_grpo/records.py",
        "for i, rollout in enumerate(rollouts) if not rollout.failed]\n    count",
        "for i, rollout in enumerate(rollouts)]\n    count",
        "tests/test_environments.py::test_a_step_with_environments",
    ),
    Mutation(
        "a failed environment is asked for a reward",
        SCRIPT,
        "if self.environments is not None and rollout.error is None:",
        "if self.environments is not None:",
        "tests/test_environments.py::test_a_failing_environment_ends_its_rollout",
    ),
    Mutation(
        "an instance with an abandoned call is used again",
        "mt_grpo/environments.py",
        "elif not rollout.abandoned and rollout.error is None:",
        "elif rollout.error is None:",
        "tests/test_environments.py::test_an_environment_whose_call_was_given_up_is_not_used_again",
    ),
    Mutation(
        "an environment's column reaches reset where it chose the class",
        "mt_grpo/environments.py",
        'if k != "environment" or None in self.by_name}',
        "}",
        "tests/test_environments.py::test_the_column_that_chooses_an_environment_is_not_passed_to_reset",
    ),
    Mutation(
        "the end of turn stays in the context of a continuation",
        SCRIPT,
        "rollout.history_ids[:-1] + ids",
        "rollout.history_ids + ids",
        "tests/test_environments.py::test_a_continuation_behind_a_sampled_end_of_turn_begins_a_record",
    ),
    Mutation(
        "a continuation may leave no room to answer",
        SCRIPT,
        "        if len(ids) > room.tokens - self.MIN_ANSWER_TOKENS:\n",
        "        if False:\n",
        "tests/test_environments.py::test_a_continuation_without_room_ends_the_conversation",
    ),
    Mutation(
        "a turn without ids cannot be continued",
        SCRIPT,
        "if turn.token_ids and turn.token_ids[-1] in written.ends:",
        "if turn.token_ids[-1] in written.ends:",
        "tests/test_environments.py::test_a_continuation_of_an_empty_turn",
    ),
    Mutation(
        "a continuation begins with a blank of the tokenizer's own",
        SCRIPT,
        "ids = written.text_ids(text)",
        'ids = self._tokenizer(llm)(text, add_special_tokens=False)["input_ids"]',
        "tests/test_environments.py::test_a_continuation_begins_with_no_blank_of_the_tokenizers_own",
    ),
    Mutation(
        "an edited history counts against max_completion_length",
        SCRIPT,
        "rollout.edited = Context(history, self.prompt_ids(history, tokenizer, rollout.tools))",
        "ids = self.prompt_ids(history, tokenizer, rollout.tools)\n        rollout.edited = Context(history, ids, len(ids))",
        "tests/test_environments.py::test_an_edited_history_begins_a_record",
    ),
    Mutation(
        "an environment's own methods run at the same time",
        SCRIPT,
        "            async with own:\n",
        "            if own:\n",
        "tests/test_environments.py::test_the_methods_of_an_environment_run_one_after_another_and_other_tools_at_the_same_time",
    ),
    Mutation(
        "all tools of an environment run one after another",
        SCRIPT,
        "            if not is_own_method(call, rollout):\n",
        "            if rollout.environment is None:\n",
        "tests/test_environments.py::test_the_methods_of_an_environment_run_one_after_another_and_other_tools_at_the_same_time",
    ),
    Mutation(
        "calls beyond max_parallel_calls are dropped",
        SCRIPT,
        'return results + [ToolResult(text, "call") for _ in calls[self.max_parallel_calls :]]',
        "return results",
        "tests/test_environments.py::test_calls_beyond_max_parallel_calls_are_answered_with_an_error",
    ),
    Mutation(
        "all calls of a turn run",
        SCRIPT,
        "calls[: self.max_parallel_calls]])",
        "calls])",
        "tests/test_environments.py::test_calls_beyond_max_parallel_calls_are_answered_with_an_error",
    ),
    Mutation(
        "the answer of a turn that the budget cut off counts",
        SCRIPT,
        "            turn.answer = None\n",
        "            pass\n",
        "tests/test_environments.py::test_a_text_that_the_budget_cut_off_is_no_answer",
    ),
    Mutation(
        "results behind an edited turn are lost",
        "mt_grpo/hermes.py",
        "messages if self.keeps_results else self.with_calls(messages, tools)",
        "messages",
        "tests/test_formats.py::test_an_edited_history_of_a_family_keeps_its_results",
    ),
    Mutation(
        "an edited turn of two calls keeps one result",
        "mt_grpo/hermes.py",
        "* count)[:count]",
        "* count)[:1]",
        "tests/test_formats.py::test_an_edited_history_of_a_family_keeps_its_results",
    ),
    Mutation(
        "an answer inside a family's thinking is one in the paper's tags",
        "mt_grpo/formats.py",
        "(pair for pair in marks if pair[0].strip() in template)",
        "iter(())",
        "tests/test_formats.py::test_thinking_of_a_family_in_the_papers_tags",
    ),
    Mutation(
        "a reply's continuation may be a list",
        "mt_grpo/replies.py",
        '(("continuation", str), ("info", dict))',
        '(("info", dict),)',
        "tests/test_environments.py::test_what_is_no_reply_ends_the_rollout",
    ),
    Mutation(
        "a reward of a reply may be NaN",
        "mt_grpo/replies.py",
        " and abs(value) <= 3.4e38  # NaN is not",
        "",
        "tests/test_environments.py::test_what_is_no_reply_ends_the_rollout",
    ),
    Mutation(
        "a rollout without a prompt is sampled",
        "mt_grpo/replies.py",
        'if not any(message["content"] for message in prompt):',
        "if False:",
        "tests/test_environments.py::test_a_prompt_has_to_come_from_somewhere",
    ),
    Mutation(
        "an environment that nobody waits for stays open",
        "mt_grpo/environments.py",
        "        if rollout.abandoned:\n            self._close_now(rollout)\n",
        "",
        "tests/test_environments.py::test_an_environment_that_nobody_waits_for_is_closed",
    ),
    Mutation(
        "an environment made while its conversation was cancelled stays open",
        "mt_grpo/environments.py",
        "        rollout.environment = cls()\n        self._open[id(rollout)] = rollout\n",
        "        rollout.environment = cls()\n",
        "tests/test_environments.py::test_an_environment_that_nobody_waits_for_is_closed",
    ),
    Mutation(
        "tools of conversations that are over are kept",
        "mt_grpo/tool_arguments.py",
        "of_functions, of_methods = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()",
        "of_functions, of_methods = {}, {}",
        "tests/test_environments.py::test_what_is_known_of_a_tool_goes_with_it",
    ),
    Mutation(
        "an isolated tool's reward is lost",
        "mt_grpo/tool_processes.py",
        'reward=answer["reward"])',
        "reward=None)",
        "tests/test_conversation.py::test_an_isolated_tool_gives_a_reward",
    ),
    Mutation(
        "an object's tool describes itself by its function",
        "mt_grpo/hermes.py",
        'if given := getattr(tool, "json_schema", None):',
        "if given := None:",
        "tests/test_environments.py::test_a_tool_may_be_an_object",
    ),
    Mutation(
        "an optional argument of an object is required",
        "mt_grpo/tools.py",
        'default=inspect.Parameter.empty if name in required else each.get("default"),',
        "default=inspect.Parameter.empty,",
        "tests/test_environments.py::test_a_tool_may_be_an_object",
    ),
    Mutation(
        "prefetched rows without a prompt have no key for it",
        "mt_grpo/resume.py",
        "else with_prompts(inputs)",
        "else inputs",
        "tests/test_environments.py::test_an_environment_may_bring_the_prompts",
    ),
    Mutation(
        "a run without data has no end",
        "mt_grpo/preflight.py",
        "if args.max_steps <= 0:",
        "if False:",
        "tests/test_environments.py::test_a_run_without_data_needs_an_environment_and_an_end",
    ),
    Mutation(
        "a method of an environment takes the place of a tool of its name",
        "mt_grpo/environments.py",
        "            merged(cls.__name__, tools.values(), self.tools_of_class",
        "            merged(cls.__name__, [], self.tools_of_class",
        "tests/test_environments.py::test_a_tool_of_the_file_with_the_name_of_a_method_is_refused",
    ),
    Mutation(
        "observations are trained on",
        "mt_grpo/rollout.py",
        "(t.per_token(int(t.trained), 0), [0] * len(t.observation_ids))",
        "(t.per_token(int(t.trained), 0), [1] * len(t.observation_ids))",
        "tests/test_conversation.py::test_two_turns_in_numbers",
    ),
    Mutation(
        "observations are credited to their turn",
        "mt_grpo/rollout.py",
        "(t.per_token(k, -1), [-1] * len(t.observation_ids))",
        "(t.per_token(k, -1), [k] * len(t.observation_ids))",
        "tests/test_conversation.py::test_two_turns_in_numbers",
    ),
    Mutation(
        "a turn may be a token longer than the completion",
        "mt_grpo/sampling.py",
        "        return min(self)\n",
        "        return min(self.completion + 1, self.context)\n",
        "tests/test_conversation.py::test_max_completion_length_counts_tool_results",
    ),
    Mutation(
        "a turn may be a token longer than the context",
        "mt_grpo/sampling.py",
        "        return min(self)\n",
        "        return min(self.completion, self.context + 1)\n",
        "tests/test_conversation.py::test_max_model_len_bounds_every_request",
    ),
    Mutation(
        "one more observation than max_env_steps",
        SCRIPT,
        "MAX_TURNS if len(rollout.turns) > self.max_steps else",
        "MAX_TURNS if len(rollout.turns) > self.max_steps + 1 else",
        "tests/test_conversation.py::test_max_steps_counts_observations_and_leaves_a_turn_to_answer",
    ),
    Mutation(
        "a mistaken call does not count as an observation",
        SCRIPT,
        "MAX_TURNS if len(rollout.turns) > self.max_steps else",
        'MAX_TURNS if sum(t.error != "call" for t in rollout.turns) > self.max_steps else',
        "tests/test_conversation.py::test_max_steps_counts_observations_and_leaves_a_turn_to_answer",
    ),
    Mutation(
        "a result is cut without a marker",
        "mt_grpo/tool_results.py",
        '.rstrip("\\ufffd") + marker',
        '.rstrip("\\ufffd")',
        "tests/test_conversation.py::test_cut_to_tokens",
    ),
    Mutation(
        "a call that is cut off ends the conversation",
        SCRIPT,
        'if not turn.calls and not replied and turn.finish_reason == "length":',
        'if not replied and turn.finish_reason == "length":',
        "tests/test_conversation.py::test_a_call_cut_off_by_the_turn_budget_is_an_observation",
    ),
    Mutation(
        "a turn that its tag ended counts as cut off",
        SCRIPT,
        '"stop" if ended else generation.finish_reason',
        "generation.finish_reason",
        "tests/test_conversation.py::test_a_call_before_the_budget_is_spent_ended_by_its_tag",
    ),
    Mutation(
        "tags inside thinking are taken for a call",
        "mt_grpo/formats.py",
        'for tag in ("</think>", "</reasoning>") if tag in text[:end]',
        "for tag in () if tag in text[:end]",
        "tests/test_conversation.py::test_parse_turn",
    ),
    Mutation(
        "the last closing tag counts",
        "mt_grpo/formats.py",
        "    end = min((text.find(tag) for tag in CLOSING_TAGS",
        "    end = max((text.find(tag) for tag in CLOSING_TAGS",
        "tests/test_conversation.py::test_parse_turn",
    ),
    Mutation(
        "a state key sees its own turn",
        SCRIPT,
        "        turn.state_key, turn.seconds, turn.generations = key, time.perf_counter() - started, generations\n        rollout.turns.append(turn)\n",
        "        rollout.turns.append(turn)\n        turn.state_key, turn.seconds, turn.generations = await self._state_key(rollout), time.perf_counter() - started, generations\n",
        "tests/test_trainer.py::test_the_environment_names_the_state_in_which_each_turn_begins",
    ),
    Mutation(
        "a result closes its own tag",
        "mt_grpo/control_tokens.py",
        'control = {"</result>", *(t for',
        "control = {*(t for",
        "tests/test_conversation.py::test_neutralise_leaves_other_text_alone",
    ),
    Mutation(
        "added tokens that are text are broken as well",
        "mt_grpo/control_tokens.py",
        "*(t for t, special in tokens.items() if is_control(t, special, template))",
        "*tokens",
        "tests/test_conversation.py::test_a_text_without_control_tokens_is_left_as_it_is",
    ),
    Mutation(
        "control tokens that are not special are left",
        "mt_grpo/control_tokens.py",
        "if is_control(t, special, template))",
        "if special)",
        "tests/test_conversation.py::test_a_neutralised_text_holds_no_control_token",
    ),
    Mutation(
        "a control token inside another is left",
        "mt_grpo/control_tokens.py",
        "    while (found := find_control(text, tokenizer)) is not None:",
        "    if (found := find_control(text, tokenizer)) is not None:",
        "tests/test_conversation.py::test_neutralise_does_not_depend_on_the_order_of_a_set",
    ),
    Mutation(
        "prompts open turns",
        SCRIPT,
        "self.with_system_prompt(neutralise_prompt(messages, tokenizer))",
        "self.with_system_prompt(messages)",
        "tests/test_conversation.py::test_control_tokens_in_a_prompt_are_neutralised",
    ),
    Mutation(
        "prompts with control tokens are changed in silence",
        "mt_grpo/preflight.py",
        "        warn_of_control_tokens(env, split, where)\n",
        "",
        "tests/test_trainer.py::test_prompts_with_control_tokens_are_told_before_training",
    ),
    Mutation(
        "the next turn does not see the result",
        "mt_grpo/rollout.py",
        "        return record.prompt_ids + record.completion_ids\n",
        "        return record.prompt_ids + join(turn.token_ids for turn in record.turns)\n",
        "tests/test_conversation.py::test_two_turns_in_numbers",
    ),
    Mutation(
        "a result leaves no room to answer",
        SCRIPT,
        "fit(turn, further, room.tokens - self.MIN_ANSWER_TOKENS,",
        "fit(turn, further, room.tokens,",
        "tests/test_conversation.py::test_a_long_result_is_cut_so_that_an_answer_fits",
    ),
    Mutation(
        "a full context is called a spent budget",
        "mt_grpo/sampling.py",
        "return StopReason.CONTEXT_LENGTH if self.context < self.completion else StopReason.MAX_TOKENS",
        "return StopReason.MAX_TOKENS",
        "tests/test_conversation.py::test_stop_reasons",
    ),
    Mutation(
        "the policy's mistake counts as the tool's",
        SCRIPT,
        'return ToolResult(f"Error: {mistake}", "call")',
        'return ToolResult(f"Error: {mistake}", "tool")',
        "tests/test_conversation.py::test_the_policys_mistakes_become_observations",
    ),
    Mutation(
        "a sample keeps the budget of its batch",
        "mt_grpo/in_process.py",
        "ids = list(token_ids[i][:max_tokens])",
        "ids = list(token_ids[i])",
        "tests/test_conversation.py::test_each_sample_is_cut_to_its_own_budget",
    ),
    Mutation(
        "batches are in the order of arrival",
        "mt_grpo/in_process.py",
        "self.batches.put(sorted(self.waiting, key=lambda request: request[0]))",
        "self.batches.put(self.waiting)",
        "tests/test_conversation.py::test_samples_do_not_depend_on_timing",
    ),
    Mutation(
        "a result without data becomes an address",
        "mt_grpo/tool_results.py",
        '    raise TypeError(f"the tool returned {type(value).__name__}, which',
        '    return str(value)\n    raise TypeError(f"the tool returned {type(value).__name__}, which',
        "tests/test_conversation.py::test_a_result_is_data_or_an_error",
    ),
    Mutation(
        "sets of results have the order of their hashes",
        "mt_grpo/tool_results.py",
        "        return sorted(value, key=lambda x:",
        "        return list(value) or sorted(value, key=lambda x:",
        "tests/test_conversation.py::test_a_result_is_data_or_an_error",
    ),
    Mutation(
        "a shortage of processes is told to the policy",
        SCRIPT,
        "            except ToolsUnavailable:  # the trainer's fault",
        "            except ZeroDivisionError:  # the trainer's fault",
        "tests/test_conversation.py::test_a_run_without_any_process_for_its_tools_ends",
    ),
    Mutation(
        "a call does not wait for a free process",
        "mt_grpo/tool_processes.py",
        "            if self._busy[loop]:\n                waiting",
        "            if False:\n                waiting",
        "tests/test_conversation.py::test_calls_wait_for_a_process_where_no_more_can_be_started",
    ),
    Mutation(
        "a tool's thread is started in the event loop",
        "mt_grpo/tool_threads.py",
        "await asyncio.get_running_loop().run_in_executor(self._starter, self._start)",
        "self._start()",
        "tests/test_conversation.py::test_the_event_loop_goes_on_while_a_thread_starts",
    ),
    Mutation(
        "a tool's thread is idle only after its result is known",
        "mt_grpo/tool_threads.py",
        "            with self._lock:\n                self._idle.append(inbox)  # first: whoever learns the result finds this "
        "thread, and starts no other\n            deliver(result)\n",
        "            deliver(result)\n            time.sleep(0.01)\n            with self._lock:\n"
        "                self._idle.append(inbox)\n",
        "tests/test_conversation.py::test_tool_threads_are_used_again_and_those_too_many_end",
    ),
    Mutation(
        "threads that no call waits for are started",
        "mt_grpo/tool_threads.py",
        "        if len(self._idle) >= self._wanted:",
        "        if False:",
        "tests/test_conversation.py::test_a_shortage_of_threads_from_the_first_call_on_ends_with_a_thread_per_call",
    ),
    Mutation(
        "a tool in a thread has not its caller's context variables",
        "mt_grpo/tool_threads.py",
        "result = context.run(tool, **arguments)",
        "result = tool(**arguments)",
        "tests/test_conversation.py::test_a_tool_in_a_thread_has_its_callers_context_variables_to_itself",
    ),
    Mutation(
        "a hung tool's thread keeps the process alive",
        "mt_grpo/tool_threads.py",
        "name=IDLE, daemon=True)",
        "name=IDLE)",
        "tests/test_conversation.py::test_a_hung_tool_on_the_callers_own_loop_does_not_keep_the_process_alive",
    ),
    Mutation(
        "a thread that has come back counts as hung",
        "mt_grpo/tool_threads.py",
        "            threading.current_thread().name = IDLE",
        "            pass",
        "tests/test_conversation.py::test_many_hung_tools_do_not_keep_the_process_alive",
    ),
    Mutation(
        "a tool's thread without work does not end",
        "mt_grpo/tool_threads.py",
        "                        self._idle.remove(inbox)\n                        return",
        "                        pass",
        "tests/test_conversation.py::test_tool_threads_are_used_again_and_those_too_many_end",
    ),
    Mutation(
        "the server's context is not asked for",
        SCRIPT,
        'self.max_model_len or getattr(llm, "max_model_len", None) or float("inf")',
        'self.max_model_len or float("inf")',
        "tests/test_conversation.py::test_the_context_is_the_backends_where_the_environment_has_none",
    ),
    Mutation(
        "sampling parameters are not looked at",
        SCRIPT,
        "        check_sampling_params(sampling_params)\n        return {",
        "        return {",
        "tests/test_conversation.py::test_unknown_sampling_parameters_are_refused",
    ),
    Mutation(
        "arguments of JSON's own types are not looked at",
        "mt_grpo/tool_arguments.py",
        "            self.validator.validate_python(value, strict=True)\n",
        "",
        "tests/test_conversation.py::test_what_is_wrong_inside_an_argument",
    ),
    Mutation(
        "arguments of the tools' types are read leniently",
        "mt_grpo/tool_arguments.py",
        "self.validator.validate_json(json.dumps(value), strict=True)",
        "self.validator.validate_json(json.dumps(value))",
        "tests/test_conversation.py::test_an_argument_that_is_not_what_its_parameter_is",
    ),
    Mutation(
        "a tool gets the JSON and not what was read from it",
        "mt_grpo/tools.py",
        "            arguments[name] = read_argument(tool, name, value)",
        "            read_argument(tool, name, value)\n            arguments[name] = value",
        "tests/test_conversation.py::test_an_argument_becomes_what_its_parameter_is",
    ),
    Mutation(
        "a tool's process does not read the arguments",
        "mt_grpo/tool_arguments.py",
        "    return ARGUMENTS_SOURCE if typed else PLAIN_SOURCE",
        "    return PLAIN_SOURCE",
        "tests/test_conversation.py::test_a_tools_file_with_types_of_its_own",
    ),
    Mutation(
        "True is taken for the 1 of a Literal or an Enum",
        "mt_grpo/tool_arguments.py",
        '    if in_model or kind not in ("literal", "enum"):',
        "    if True:",
        "tests/test_conversation.py::test_an_argument_that_is_not_what_its_parameter_is",
    ),
    Mutation(
        "a default's set is shown in its own order",
        "mt_grpo/tool_arguments.py",
        "    return json_form(default) if isinstance(default, (set, frozenset)) else default",
        "    return default",
        "tests/test_conversation.py::test_the_model_reads_what_to_write_for_a_type_that_json_does_not_have",
    ),
    Mutation(
        "a parameter that no JSON fits is taken",
        "mt_grpo/tools.py",
        "        ArgumentReader(hints[name]), json_schema(hints[name])\n",
        "        pass\n",
        "tests/test_conversation.py::test_a_parameter_that_no_json_fits_is_refused",
    ),
    Mutation(
        "wiki: MediaWiki searches titles only",
        "tools/wiki_search.py",
        'srwhat="text", ',
        "",
        "tests/test_tools.py::test_wiki_with_the_search_of_mediawiki_itself",
    ),
    Mutation(
        "wiki: pages without an extract stay without text",
        "tools/wiki_search.py",
        "if without := [",
        "if False and [",
        "tests/test_tools.py::test_wiki_with_the_search_of_mediawiki_itself",
    ),
    Mutation(
        "wiki: common words count more than rare ones",
        "tools/wiki_search.py",
        "math.log(1 + most / total)",
        "(1.0 if total < 2 else 3.0)",
        "tests/test_tools.py::test_wiki_with_the_search_of_mediawiki_itself",
    ),
    Mutation(
        "wiki: the check takes no results for an answer",
        "tools/wiki_search.py",
        'if not wiki_search(query).startswith("[1] ")',
        "if not wiki_search(query)",
        "tests/test_tools.py::test_check_of_a_wiki_whose_search_finds_nothing",
    ),
    Mutation(
        "wiki: stumps of passages",
        "tools/wiki_search.py",
        "MIN_CUT_CHARS = 300",
        "MIN_CUT_CHARS = 50",
        "tests/test_tools.py::test_no_stump_of_a_passage",
    ),
    Mutation(
        "wiki: a retrieval server's surplus is kept",
        "tools/wiki_search.py",
        "in passages[:topk]]",
        "in passages]",
        "tests/test_tools.py::test_server_that_returns_more_than_asked_for",
    ),
    Mutation(
        "wiki: the lock follows links",
        "tools/wiki_search.py",
        " | os.O_NOFOLLOW",
        "",
        "tests/test_tools.py::test_lock_that_others_have_put_there",
    ),
    Mutation(
        "wiki: the lock may be a pipe",
        "tools/wiki_search.py",
        "if not S_ISREG(opened.st_mode) or ",
        "if ",
        "tests/test_tools.py::test_lock_that_others_have_put_there",
    ),
    Mutation(
        "wiki: an index may be a pipe",
        "tools/wiki_search.py",
        "if not index.is_file():",
        "if index.is_dir():",
        "tests/test_tools.py::test_index_that_is_a_pipe",
    ),
]
CONFIGURATION_AND_DATA: list[Mutation] = [
    Mutation(
        "a documented default is not the key's",
        "docs/recipes.md",
        "| `turn_discount` | 1.0 |",
        "| `turn_discount` | 0.9 |",
        "tests/test_docs.py::test_every_key_is_documented_with_its_default",
    ),
    Mutation(
        "a documented command has an option that nothing takes",
        "docs/recipes.md",
        "--num_problems 512 --k 4",
        "--problems 512 --k 4",
        "tests/test_docs.py::test_every_command_has_a_script_and_options_that_it_accepts",
    ),
    Mutation(
        "data that fills no batch is taken",
        "mt_grpo/preflight.py",
        "if num_prompts < needed:",
        "if num_prompts < 0:",
        "tests/test_recipes.py::test_fewer_prompts_than_a_batch_needs",
    ),
    Mutation(
        "the plan counts the prompts of one process",
        "scripts/launch_plan.py",
        "check_num_prompts(len(rows), whole)",
        "check_num_prompts(len(rows), args)",
        "tests/test_scripts.py::test_the_plan_refuses_what_cannot_train",
    ),
    Mutation(
        "a run without a step ends well",
        "mt_grpo/resume.py",
        "        if self.state.global_step == 0:\n            raise RunError(",
        "        if False:\n            raise RunError(",
        "tests/test_recipes.py::test_a_run_without_a_step_fails",
    ),
    Mutation(
        "NaN is in every range",
        "mt_grpo/settings.py",
        "return low < number < high or at_a_bound",
        "return not (number < low or number > high) or at_a_bound",
        "tests/test_recipes.py::test_every_number_has_a_range",
    ),
    Mutation(
        "numbers of generation_kwargs have no range",
        "mt_grpo/refusals.py",
        "if key in RANGES and not (fits_type(value, float)",
        "if False and not (fits_type(value, float)",
        "tests/test_recipes.py::test_numbers_of_generation_kwargs_have_the_same_ranges",
    ),
    Mutation(
        "reward weights of Python have no range",
        "mt_grpo/scoring.py",
        'if not all(in_range(weight, RANGES[f"{kind}_reward_weights"])',
        'if not all(True or in_range(weight, RANGES[f"{kind}_reward_weights"])',
        "tests/test_recipes.py::test_weights_given_in_python_are_finite_too",
    ),
    Mutation(
        "the last of two equal keys wins",
        "mt_grpo/recipes.py",
        "lines.setdefault(key, line) != line",
        "not lines.setdefault(key, line)",
        "tests/test_recipes.py::test_bad_recipe",
    ),
    Mutation(
        "the package of a logger is not looked for",
        "mt_grpo/refusals.py",
        'if name not in (*available, "azure_ml", "flyte"):',
        "if name in ():",
        "tests/test_recipes.py::test_bad_recipe",
    ),
    Mutation(
        "--config=FILE is not understood",
        "mt_grpo/recipes.py",
        'if a.startswith("--config=")',
        'if a.startswith("--configuration=")',
        "tests/test_recipes.py::test_what_is_given_twice_on_the_command_line_is_said",
    ),
    Mutation(
        "SystemExit in a tools file ends the run without a word",
        "mt_grpo/plugins.py",
        "    except BaseException as error:  # SystemExit too, which would end the run without a word\n        raise",
        "    except Exception as error:\n        raise",
        "tests/test_recipes.py::test_bad_tool_or_reward_file",
    ),
    Mutation(
        "SystemExit in CHECK_TOOLS ends the run without a word",
        "mt_grpo/plugins.py",
        "    except BaseException as error:  # SystemExit too, which would end the run without a word\n        text",
        "    except Exception as error:\n        text",
        "tests/test_recipes.py::test_bad_tool_or_reward_file",
    ),
    Mutation(
        "a reward's column is looked for only while training",
        "mt_grpo/scoring.py",
        "if by_name and parameter.default is",
        "if not by_name and parameter.default is",
        "tests/test_recipes.py::test_bad_tool_or_reward_file",
    ),
    Mutation(
        "columns that the first row lacks are dropped",
        "mt_grpo/data.py",
        "columns = list(dict.fromkeys(key for row in rows for key in row))",
        "columns = list(rows[0])",
        "tests/test_recipes.py::test_data_that_is_good_in_spite_of_its_looks",
    ),
    Mutation(
        "a misspelt split is trained on",
        "mt_grpo/data.py",
        'if split not in ("train", "test") or (size',
        "if (size",
        "tests/test_recipes.py::test_dataset_that_is_not_there",
    ),
    Mutation(
        "an answer of null is taken",
        "mt_grpo/data.py",
        "not question.strip() or answer is None:",
        "not question.strip():",
        "tests/test_recipes.py::test_bad_dataset",
    ),
    Mutation(
        "a tool that changes the folder moves the output",
        SCRIPT,
        "= absolute(self.output_dir), absolute(",
        "= self.output_dir, absolute(",
        "tests/test_scripts.py::test_a_run_outlives_its_output_and_a_tool_that_changes_the_folder",
    ),
    Mutation(
        "a closed pipe ends the run",
        SCRIPT,
        "    keep_output_open()\n    with ExitStack",
        "    with ExitStack",
        "tests/test_scripts.py::test_a_run_outlives_its_output_and_a_tool_that_changes_the_folder",
    ),
]

STOPPING_AND_RESUMING: list[Mutation] = [
    Mutation(
        "a stopped batch's random numbers are not restored",
        "mt_grpo/snapshots.py",
        "        set_rng_state(self.rng)\n",
        "        pass\n",
        "tests/test_faults.py::test_where_a_run_is_stopped_does_not_matter[rewards]",
    ),
    Mutation(
        "a stopped batch's tokens are counted twice",
        "mt_grpo/snapshots.py",
        "        state.num_input_tokens_seen = self.num_tokens\n",
        "        pass\n",
        "tests/test_faults.py::test_where_a_run_is_stopped_does_not_matter[rewards]",
    ),
    Mutation(
        "a new epoch's first random number is drawn twice",
        "mt_grpo/snapshots.py",
        "    on_step_end = on_train_begin\n",
        "    on_step_begin = on_train_begin\n",
        "tests/test_faults.py::test_where_a_run_is_stopped_does_not_matter[first-batch-of-an-epoch]",
    ),
    Mutation(
        "an evaluation draws random numbers from training",
        "mt_grpo/resume.py",
        "            set_rng_state(before)\n",
        "            pass\n",
        "tests/test_faults.py::test_where_a_run_is_stopped_does_not_matter[second-batch-of-an-evaluation]",
    ),
    Mutation(
        "the order of the prompts does not depend on the epoch",
        "mt_grpo/snapshots.py",
        "self.sampler.seed + self.epoch())",
        "self.sampler.seed)",
        "tests/test_trainer.py::test_each_epoch_has_an_order_of_its_own_the_first_is_trls",
    ),
    Mutation(
        "the order of every epoch is the first one's",
        "mt_grpo/resume.py",
        "lambda: int(self.state.epoch or 0))",
        "lambda: 0)",
        "tests/test_trainer.py::test_each_epoch_has_an_order_of_its_own_the_first_is_trls",
    ),
    Mutation(
        "a loaded checkpoint is no new version of the weights",
        "mt_grpo/weights.py",
        "# after resume_from_checkpoint has loaded\n        self.version += 1\n",
        "# after resume_from_checkpoint has loaded\n",
        "tests/test_trainer.py::test_resume_continues_as_if_uninterrupted[first-epoch]",
    ),
    Mutation(
        "the best model loaded at the end is no new version of the weights",
        "mt_grpo/weights.py",
        "# after load_best_model_at_end has loaded\n        self.version += 1\n",
        "# after load_best_model_at_end has loaded\n",
        "tests/test_trainer.py::test_resume_continues_as_if_uninterrupted[first-epoch]",
    ),
    Mutation(
        "a resumed run trains on beyond its last step",
        "mt_grpo/resume.py",
        "        if self.state.global_step >= self.state.max_steps:  # resumed",
        "        if self.state.global_step > self.state.max_steps:  # resumed",
        "tests/test_trainer.py::test_a_run_that_is_resumed_at_its_end_does_nothing_more",
    ),
    Mutation(
        "a checkpoint is saved in the middle of a batch of rollouts",
        "mt_grpo/refusals.py",
        "        if steps % every:\n",
        "        if False:\n",
        "tests/test_recipes.py::test_save_points_between_two_batches_of_rollouts_only",
    ),
    Mutation(
        "the state is written before other ranks' files",
        "mt_grpo/saving.py",
        "        self._raise_save_errors()  # INVARIANT: ranks meet;",
        "        # ranks do not meet;",
        "tests/test_checkpoints.py::test_two_ranks_agree_on_a_checkpoint_that_one_cannot_write",
    ),
    Mutation(
        "an older run's state stays in a torn checkpoint",
        "mt_grpo/saving.py",
        'all of it is there\n                    (path / "trainer_state.json").unlink(missing_ok=True)\n',
        "all of it is there\n                    pass\n",
        "tests/test_checkpoints.py::test_a_kill_in_mid_save_leaves_no_whole_checkpoint",
    ),
    Mutation(
        "an older run's folder of the same step is taken for this run's",
        "mt_grpo/resume.py",
        "        if step not in self._saved:  # a folder",
        '        if not list(Path(self.args.output_dir).glob(f"checkpoint-{step}")):  # a folder',
        "tests/test_faults.py::test_where_a_run_is_stopped_does_not_matter[rewards]",
    ),
    Mutation(
        "a stop saves no optimizer state",
        "mt_grpo/resume.py",
        "            self.args.save_only_model = False  # of which nothing could be continued\n",
        "",
        "tests/test_faults.py::test_where_a_run_is_stopped_does_not_matter[first-batch-of-an-epoch]",
    ),
    Mutation(
        "the optimizer's state is dropped",
        "mt_grpo/saving.py",
        "            super()._save_optimizer_and_scheduler(output_dir)\n",
        "            pass\n",
        "tests/test_trainer.py::test_resume_continues_as_if_uninterrupted[first-epoch]",
    ),
    Mutation(
        "a stop ends with the code of success",
        "mt_grpo/resume.py",
        "sys.exit(128 + stopped.signum)",
        "sys.exit(0)",
        "tests/test_faults.py::test_where_a_run_is_stopped_does_not_matter[rewards]",
    ),
    Mutation(
        "last is the highest number, not the newest",
        "mt_grpo/checkpoints.py",
        'key=lambda folder: (folder / "trainer_state.json").stat().st_mtime, default=None)\n    if whole and',
        'key=lambda folder: int(folder.name.rpartition("-")[2]), default=None)\n    if whole and',
        "tests/test_recipes.py::test_last_is_not_of_an_older_run_that_went_on_for_longer",
    ),
    Mutation(
        "a missing optimizer is not missed",
        "mt_grpo/checkpoints.py",
        '        expected += [] if in_fsdp_form else ["optimizer.pt"]\n',
        "",
        "tests/test_checkpoints.py::test_a_damaged_part_is_named[optimizer.pt-missing]",
    ),
    Mutation(
        "a missing scheduler is not missed",
        "mt_grpo/checkpoints.py",
        'expected = [] if deepspeed else ["scheduler.pt"]',
        "expected = []",
        "tests/test_checkpoints.py::test_a_damaged_part_is_named[scheduler.pt-missing]",
    ),
    Mutation(
        "a shard that is missing is not missed",
        "mt_grpo/checkpoints.py",
        "        expected += sorted(set(shards.values()))\n",
        "",
        "tests/test_checkpoints.py::test_every_form_of_a_checkpoint_is_known[sharded]",
    ),
    Mutation(
        "a torn safetensors file is taken for whole",
        "mt_grpo/checkpoints.py",
        "        return None if size == whole else",
        "        return None if size else",
        "tests/test_checkpoints.py::test_a_damaged_part_is_named[model.safetensors-cut]",
    ),
    Mutation(
        "a torn torch file is taken for whole",
        "mt_grpo/checkpoints.py",
        '        return f"is cut off or damaged ({size} bytes)"',
        "        return None",
        "tests/test_checkpoints.py::test_a_damaged_part_is_named[optimizer.pt-cut]",
    ),
    Mutation(
        "the checkpoint that is offered is damaged too",
        "mt_grpo/checkpoints.py",
        " and not checkpoint_damage(folder)]",
        "]",
        "tests/test_checkpoints.py::test_a_damaged_part_is_named[rng_state.pth-empty]",
    ),
    Mutation(
        "a checkpoint without room ends the run",
        "mt_grpo/saving.py",
        "        except SaveError as error:\n            self._snapshot.forget_best(self.state)\n",
        "        except ZeroDivisionError as error:\n            self._snapshot.forget_best(self.state)\n",
        "tests/test_checkpoints.py::test_a_checkpoint_without_room_costs_only_itself[False]",
    ),
    Mutation(
        "a torn checkpoint stays",
        "mt_grpo/saving.py",
        "                    shutil.rmtree(path, ignore_errors=True)\n                raise\n",
        "                raise\n",
        "tests/test_checkpoints.py::test_a_checkpoint_without_room_costs_only_itself[True]",
    ),
    Mutation(
        "the best model is one that could not be saved",
        "mt_grpo/saving.py",
        "            self._snapshot.forget_best(self.state)\n",
        "",
        "tests/test_checkpoints.py::test_a_checkpoint_without_room_costs_only_itself[False]",
    ),
    Mutation(
        "a model without room is given up at once",
        "mt_grpo/saving.py",
        "            if attempt + 1 == self.SAVE_ATTEMPTS or",
        "            if True or",
        "tests/test_checkpoints.py::test_the_trained_model_waits_for_room",
    ),
    Mutation(
        "a model that is elsewhere is no failure",
        "mt_grpo/saving.py",
        "                if error is None:\n                    return\n",
        "                if folder:\n                    return\n",
        "tests/test_checkpoints.py::test_a_model_that_is_elsewhere_is_a_failure",
    ),
    Mutation(
        "a changed data set is not told",
        "mt_grpo/run_record.py",
        "columns = {name: sha256(json.dumps(list(dataset[name]), default=str))",
        "columns = {name: 0",
        "tests/test_checkpoints.py::test_a_resumed_run_lists_what_differs",
    ),
    Mutation(
        "a changed reward file is not told",
        "mt_grpo/run_record.py",
        "return sha256(Path(inspect.getsourcefile(inspect.unwrap(function))).read_bytes())",
        "return sha256(function.__name__)",
        "tests/test_checkpoints.py::test_a_resumed_run_lists_what_differs",
    ),
    Mutation(
        "half of a line of rollouts stays",
        "mt_grpo/run_log.py",
        "            os.truncate(path, size)\n",
        "            pass\n",
        "tests/test_checkpoints.py::test_half_of_a_line_does_not_stay",
    ),
    Mutation(
        "keeper: sessions are not looked at",
        KEEPER,
        "if {os.getsid(process.pid), os.getpgid(process.pid)} & sessions:",
        "if False:",
        KILLED_LAUNCH,
    ),
    Mutation(
        "keeper: the mark is not looked at",
        KEEPER,
        "return process.environ().get(MARK) == mark",
        "return False",
        KILLED_LAUNCH,
    ),
    Mutation(
        "keeper: nothing is killed",
        KEEPER,
        'send("kill", left)',
        "pass",
        KILLED_LAUNCH,
    ),
    Mutation(
        "keeper: the folder of weights is left",
        KEEPER,
        "shutil.rmtree(folder, ignore_errors=True)",
        "pass",
        KILLED_LAUNCH,
    ),
    Mutation(
        "launcher: signals reach the keeper",
        LAUNCHER,
        "signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, ())",
        KEEPER_LOST,
    ),
    Mutation(
        "launcher: a hang-up ends it under nohup",
        LAUNCHER,
        "if signal.getsignal(number) is not signal.SIG_IGN:",
        "if True:",
        KEEPER_LOST,
    ),
    Mutation(
        "launcher: nothing is ended without a keeper",
        LAUNCHER,
        "if self.keeper.wait():",
        "if self.keeper.wait() is None:",
        KEEPER_LOST,
    ),
    Mutation(
        "launcher: the keeper is told of no process",
        LAUNCHER,
        'self.tell(f"process {name} {process.pid}")',
        "pass",
        "tests/test_scripts.py::test_a_stop_during_the_checks_ends_them",
    ),
    Mutation(
        "launcher: any answer is a healthy server",
        LAUNCHER,
        'return b" 200 " in connection.recv(64)',
        "return bool(connection.recv(64))",
        "tests/test_scripts.py::test_the_exit_code_is_the_trainers",
    ),
    Mutation(
        "launcher: the server listens everywhere",
        LAUNCHER,
        'plan["model"], "--host", "127.0.0.1",',
        'plan["model"], "--host", "0.0.0.0",',
        "tests/test_scripts.py::test_the_commands_for_gpus",
    ),
    Mutation(
        "port lock: a link is followed",
        LAUNCHER,
        " | os.O_NOFOLLOW",
        "",
        ODD_LOCK,
    ),
    Mutation(
        "port lock: a FIFO is locked",
        LAUNCHER,
        "stat.S_ISREG(status.st_mode) and ",
        "",
        ODD_LOCK,
    ),
    Mutation(
        "port lock: the file is emptied",
        LAUNCHER,
        "os.O_RDWR | os.O_CREAT |",
        "os.O_RDWR | os.O_CREAT | os.O_TRUNC |",
        "tests/test_scripts.py::test_a_lock_is_its_owners_alone_and_lasts",
    ),
    Mutation(
        "port lock: a port in use is taken",
        LAUNCHER,
        "            if is_free(port):",
        "            if True:",
        ODD_LOCK,
    ),
]

AGENTS = [
    Mutation(
        "agents: a second branch goes on in the record of the first",
        "mt_grpo/adapters/chains.py",
        "if parent is not None and each is min(parent.children, key=lambda child: child.answer.number):",
        "if parent is not None:",
        "tests/test_agents.py::test_repetitions_and_branches",
    ),
    Mutation(
        "agents: the tools of a request are not compared",
        "mt_grpo/adapters/chains.py",
        "if each.tools == tools and each.is_begun_by(keys)]",
        "if each.is_begun_by(keys)]",
        "tests/test_agents.py::test_other_tools_begin_a_record",
    ),
    Mutation(
        "agents: turns of the frozen model are trained on",
        "mt_grpo/adapters/chains.py",
        "turn.context, turn.after, turn.trained = None, None, each.request.trained",
        "turn.context, turn.after, turn.trained = None, None, True",
        "tests/test_agents.py::test_a_frozen_branch_is_read_and_not_trained",
    ),
    Mutation(
        "agents: a message that the policy never wrote is taken for sampled",
        "mt_grpo/adapters/chains.py",
        'if best is None or any(message["role"] == "assistant" for message in request.messages[len(best.keys) :]):',
        "if best is None:",
        "tests/test_agents.py::test_an_assistants_message_that_was_not_sampled_begins_a_record",
    ),
    Mutation(
        "agents: the arguments of calls are not compared",
        "mt_grpo/adapters/chains.py",
        'if sent[0] != "assistant" or sent[2] != calls:',
        'if sent[0] != "assistant":',
        "tests/test_agents.py::test_what_was_not_said_begins_a_record",
    ),
    Mutation(
        "agents: requests at the same time overrun the budget",
        "mt_grpo/adapters/agent_session.py",
        "if len(turn.token_ids) > left:",
        "if False:",
        "tests/test_agents.py::test_requests_at_the_same_time_share_the_token_budget",
    ),
    Mutation(
        "agents: a retry is sampled anew",
        "mt_grpo/adapters/agent_session.py",
        "if task is None or (task.done() and not is_retry):",
        "if task is None or task.done():",
        "tests/test_agents.py::test_a_request_in_flight_is_joined_and_a_retry_gets_what_was_sampled",
    ),
    Mutation(
        "agents: a request in flight is sampled twice",
        "mt_grpo/adapters/agent_session.py",
        "if task is None or (task.done() and not is_retry):",
        "if task is None or not is_retry:",
        "tests/test_agents.py::test_a_request_in_flight_is_joined_and_a_retry_gets_what_was_sampled",
    ),
    Mutation(
        "agents: a request is sampled after the end of its rollout",
        "mt_grpo/adapters/agent_session.py",
        "if self.stop_reason is not None or self.closed:",
        "if self.stop_reason is not None:",
        "tests/test_agents.py::test_an_agent_whose_conversation_is_cancelled_gets_no_answer_any_more",
    ),
    Mutation(
        "agents: what stands behind a stop text is kept",
        "mt_grpo/adapters/agent_session.py",
        "if not self._ends(ids):",
        "if True:",
        "tests/test_agents.py::test_what_the_api_says_of_an_answer",
    ),
    Mutation(
        "agents: words of control in an agent's texts open turns",
        "mt_grpo/adapters/agent_prompts.py",
        "            return neutralise(value, self.tokenizer)\n",
        "            return value\n",
        "tests/test_agents.py::test_control_tokens_of_an_agents_texts_are_broken",
    ),
    Mutation(
        "agents: the time of the policy is the agent's",
        "mt_grpo/adapters/agent_programs.py",
        "left = seconds - (time.monotonic() - began) + session.policy_seconds - before",
        "left = seconds - (time.monotonic() - began)",
        "tests/test_agents.py::test_the_policys_time_is_not_the_agents",
    ),
    Mutation(
        "agents: the failure of an agent is trained on",
        "mt_grpo/rollout.py",
        "FAILURES = (StopReason.ENVIRONMENT_ERROR, StopReason.AGENT_ERROR,",
        "FAILURES = (StopReason.ENVIRONMENT_ERROR,",
        "tests/test_agents.py::test_an_agents_failure_is_not_trained",
    ),
    Mutation(
        "agents: a reward by header is counted for each retry",
        "mt_grpo/adapters/agent_session.py",
        "            if reward is not None:\n                self._reward_of(",
        "            if True:\n                self._reward_of(",
        "tests/test_agents.py::test_a_reward_by_header_is_given_once",
    ),
    Mutation(
        "agents: an answer that was extended before is extended in its record again",
        "mt_grpo/rollout.py",
        "chain_of[k - 1 if turn.after is None else turn.after]",
        "chain_of[k - 1]",
        "tests/test_agents.py::test_requests_at_the_same_time_go_on_from_their_own_answers",
    ),
]

SWIFT = [
    Mutation(
        "swift: an end of turn is read where a message goes on",
        "mt_grpo/adapters/swift_reading.py",
        "ids = parent.prompt_ids + (sampled[:-1] if drops_end else sampled)",
        "ids = parent.prompt_ids + (sampled)",
        "tests/test_ms_swift.py::test_a_message_that_goes_on_behind_an_end_of_turn_is_read_without_it",
    ),
    Mutation(
        "swift: a record goes on where its end of turn is not read",
        "mt_grpo/adapters/swift_reading.py",
        "in_record = going.is_whole and not parent.is_read and not drops_end",
        "in_record = going.is_whole and not parent.is_read",
        "tests/test_ms_swift.py::test_a_message_that_goes_on_behind_an_end_of_turn_is_read_without_it",
    ),
    Mutation(
        "swift: two requests go on in one record",
        "mt_grpo/adapters/swift_reading.py",
        "in_record = going.is_whole and not parent.is_read and not drops_end",
        "in_record = going.is_whole and not drops_end",
        "tests/test_ms_swift.py::test_two_requests_from_one_response_are_two_records",
    ),
    Mutation(
        "swift: other tools go on in a record",
        "mt_grpo/adapters/swift_samples.py",
        "if sample.tools != tools or sample.before != keys[:place]:",
        "if sample.before != keys[:place]:",
        "tests/test_ms_swift.py::test_other_tools_begin_a_record",
    ),
    Mutation(
        "swift: an edited history goes on in a record",
        "mt_grpo/adapters/swift_samples.py",
        "if sample.tools != tools or sample.before != keys[:place]:",
        "if sample.tools != tools:",
        "tests/test_ms_swift.py::test_an_edited_history_begins_a_record",
    ),
    Mutation(
        "swift: a cut ends inside a character",
        "mt_grpo/adapters/swift_samples.py",
        '.rstrip("\\N{REPLACEMENT CHARACTER}"))',
        ")",
        "tests/test_ms_swift.py::test_a_cut_keeps_whole_characters",
    ),
    Mutation(
        "swift: an id that was not sampled is trained",
        "mt_grpo/adapters/swift_revise.py",
        "    if any(mask[same:]):\n        raise not_sampled(ids, mask, same, len(sampled))\n",
        "",
        "tests/test_ms_swift.py::test_a_failure_is_the_environments_and_says_why",
    ),
    Mutation(
        "swift: what was cut off is trained",
        "mt_grpo/adapters/swift_revise.py",
        "token_ids=ids[:kept], logprobs=logprobs and logprobs[:kept], mask=mask and mask[:kept],",
        "token_ids=ids, logprobs=logprobs, mask=mask,",
        "tests/test_ms_swift.py::test_a_cut_answer_token_for_token",
    ),
    Mutation(
        "swift: an answer that was taken back is trained",
        "mt_grpo/adapters/swift_outputs.py",
        "sample.turn.trained = not sample.taken_back and (sample.masked or by_rule)",
        "sample.turn.trained = sample.masked or by_rule",
        "tests/test_ms_swift.py::test_an_answer_that_is_taken_back_is_not_trained",
    ),
    Mutation(
        "swift: ids that were left out are trained",
        "mt_grpo/adapters/swift_revise.py",
        "chosen.append(mask[place] if there else 0)",
        "chosen.append(mask[place] if there else 1)",
        "tests/test_ms_swift.py::test_ids_that_leave_out_an_end_of_turn_only_mask_it",
    ),
    Mutation(
        "swift: text behind a response is not read",
        "mt_grpo/adapters/swift_revise.py",
        "        sample.tail = sample.tail + written.text_ids(without_turns(behind, written.tokenizer))\n",
        "",
        "tests/test_ms_swift.py::test_a_continuation_token_for_token",
    ),
    Mutation(
        "swift: a scheduler's text ends a turn",
        "mt_grpo/adapters/swift_revise.py",
        '    return re.sub("|".join(special)',
        '    return text or re.sub("|".join(special)',
        "tests/test_ms_swift.py::test_a_schedulers_tags_stay_and_its_ends_of_turn_do_not",
    ),
    Mutation(
        "swift: outputs of a list share a record",
        "mt_grpo/adapters/swift_outputs.py",
        "            groups[0][0].fresh = None\n",
        "",
        "tests/test_ms_swift.py::test_outputs_that_are_a_list_are_a_record_each",
    ),
    Mutation(
        "swift: a response that no output has is trained",
        "mt_grpo/adapters/swift_outputs.py",
        "        sample.turn.trained = False\n",
        "        sample.turn.trained = True\n",
        "tests/test_ms_swift.py::test_a_run_of_ones_own",
    ),
    Mutation(
        "swift: last_round trains all",
        "mt_grpo/adapters/swift_outputs.py",
        'by_rule = sample.is_last or loss.base != "last_round"',
        "by_rule = True",
        "tests/test_ms_swift.py::test_last_round_trains_the_last_message_alone",
    ),
    Mutation(
        "swift: loss_scale masks nothing",
        "mt_grpo/adapters/swift_loss.py",
        "mask[first:last] = [0] * max(0, last - first)",
        "mask[first:last] = [1] * max(0, last - first)",
        "tests/test_ms_swift.py::test_a_loss_scale_masks_parts_of_the_text",
    ),
    Mutation(
        "swift: a mask is not that of the loss",
        "mt_grpo/rollout.py",
        "[value if one else masked for one in self.mask]",
        "[value for one in self.mask]",
        "tests/test_ms_swift.py::test_a_mask_chooses_among_what_was_sampled",
    ),
    Mutation(
        "swift: done lets a response that was cut off go on",
        "mt_grpo/adapters/swift_loop.py",
        'stop = ended["done"] or choice.finish_reason == "length"',
        'stop = ended["done"]',
        "tests/test_ms_swift.py::test_a_turn_that_was_cut_off_ends_an_environment",
    ),
    Mutation(
        "swift: environments are not closed",
        "mt_grpo/adapters/ms_swift.py",
        'if hasattr(scheduler, "_close_and_remove"):',
        "if False:",
        "tests/test_ms_swift.py::test_a_turn_that_was_cut_off_ends_an_environment",
    ),
    Mutation(
        "swift: the thinking of earlier turns is read",
        "mt_grpo/adapters/swift_messages.py",
        "for message in [] if keeps_thinking else messages[:last]:",
        "for message in []:",
        "tests/test_ms_swift.py::test_last_round_leaves_thinking_out_of_a_run_of_ones_own",
    ),
    Mutation(
        "swift: a request goes to the conversation of its task",
        "mt_grpo/adapters/ms_swift.py",
        'session = self.sessions.get(getattr(infer_request, "uuid", None)) or CURRENT.get()',
        "session = CURRENT.get()",
        "tests/test_ms_swift.py::test_requests_of_a_shared_worker_reach_their_own_conversation",
    ),
    Mutation(
        "swift: requests at the same time overrun the budget",
        "mt_grpo/adapters/swift_session.py",
        "        if len(turn.token_ids) <= left:\n            return turn",
        "        return turn",
        "tests/test_ms_swift.py::test_requests_at_the_same_time_share_the_budget",
    ),
]
GYM = [
    Mutation(
        "gym: a budget's cut is an action",
        "mt_grpo/adapters/gym_environment.py",
        '        if turn.finish_reason == "length":\n            return Reply(reward=self.unfinished_reward or None, info={"action": None})\n',
        "",
        "tests/test_gym.py::test_an_episode_that_the_policy_left",
    ),
    Mutation(
        "gym: a cut costs the outcome alone",
        "mt_grpo/adapters/gym_environment.py",
        '            return Reply(reward=self.unfinished_reward or None, info={"action": None})',
        "            return Reply()",
        "tests/test_gym.py::test_an_episode_that_the_policy_left",
    ),
    Mutation(
        "gym: the last turn costs the outcome alone",
        "mt_grpo/adapters/gym_environment.py",
        "leaving = self.unfinished_reward if last else 0.0",
        "leaving = 0.0",
        "tests/test_gym.py::test_an_episode_that_the_policy_left",
    ),
    Mutation(
        "gym: a call is run",
        "mt_grpo/adapters/gym_environment.py",
        "        turn.calls, turn.results = [], []  # a game has no tools: what looks like a call is text\n",
        "",
        "tests/test_gym.py::test_what_looks_like_a_call_is_text tests/test_gym.py::test_an_episode_that_the_policy_left",
    ),
    Mutation(
        "gym: what is no action has a reward",
        "mt_grpo/adapters/gym_environment.py",
        "reward=leaving or None",
        "reward=leaving",
        "tests/test_gym.py::test_a_text_that_is_no_action_moves_nothing",
    ),
    Mutation(
        "gym: an end by the time limit goes on",
        "mt_grpo/adapters/gym_environment.py",
        "over = self.terminated or self.truncated\n        return Reply(",
        "over = self.terminated\n        return Reply(",
        "tests/test_gym.py::test_terminated_and_truncated",
    ),
    Mutation(
        "gym: a game that was over counts as left",
        "mt_grpo/adapters/gym_environment.py",
        "(0.0 if over else self.unfinished_reward)",
        "self.unfinished_reward",
        "tests/test_gym.py::test_a_hole_ends_the_episode_with_nothing",
    ),
    Mutation(
        "gym: a game that was left costs nothing",
        "mt_grpo/adapters/gym_environment.py",
        "(0.0 if over else self.unfinished_reward)",
        "0.0",
        "tests/test_gym.py::test_an_episode_that_the_policy_left",
    ),
    Mutation(
        "gym: rewards of the last episode stay",
        "mt_grpo/adapters/gym_environment.py",
        "        self.rewards, self.terminated, self.truncated = [], False, False\n",
        "        self.terminated, self.truncated = False, False\n",
        "tests/test_gym.py::test_an_environment_is_played_again",
    ),
    Mutation(
        "gym: the seed of a row is dropped",
        "mt_grpo/adapters/gym_environment.py",
        "self.env.reset(seed=seed, options=options)",
        "self.env.reset(options=options)",
        "tests/test_gym.py::test_blackjack_reads_its_cards_as_json",
    ),
    Mutation(
        "gym: options of a row are dropped",
        "mt_grpo/adapters/gym_environment.py",
        "self.env.reset(seed=seed, options=options)",
        "self.env.reset(seed=seed)",
        "tests/test_gym.py::test_the_columns_of_a_row_begin_the_episode",
    ),
    Mutation(
        "gym: the state is what was first seen",
        "mt_grpo/adapters/gym_environment.py",
        "        self.rewards.append(float(reward))\n        self.shown = checked(",
        "        self.rewards.append(float(reward))\n        checked(",
        "tests/test_gym.py::test_states_are_the_boards tests/test_gym.py::test_an_environment_is_played_again",
    ),
    Mutation(
        "gym: what is no text is shown",
        "mt_grpo/adapters/gym_environment.py",
        "    if not isinstance(text, str):\n        raise TypeError",
        "    if False:\n        raise TypeError",
        "tests/test_gym.py::test_a_text_that_is_none_is_an_environments_failure",
    ),
    Mutation(
        "gym: games share their arguments",
        "mt_grpo/adapters/gym_environment.py",
        "cls(**copy.deepcopy(kwargs))",
        "cls(**kwargs)",
        "tests/test_gym.py::test_games_share_no_arguments",
    ),
    Mutation(
        "gym: a game without a text stays open",
        "mt_grpo/adapters/gym_environment.py",
        "            self.env.close()\n            raise",
        "            raise",
        "tests/test_gym.py::test_a_game_whose_text_cannot_be_made_is_closed",
    ),
    Mutation(
        "gym: what was thought is an action",
        "mt_grpo/adapters/gym_environment.py",
        'turn.text.rpartition("</think>")[2]',
        "turn.text",
        "tests/test_gym.py::test_what_was_thought_is_no_action",
    ),
    Mutation(
        "gym: unclosed thinking is an action",
        "mt_grpo/adapters/gym_environment.py",
        '    if turn.open_thinking:\n        return ""\n',
        "",
        "tests/test_gym.py::test_what_was_thought_is_no_action",
    ),
    Mutation(
        "gym: an answer hides the action",
        "mt_grpo/adapters/gym_environment.py",
        "turn.answer is None or (CLOSE in behind and CLOSE not in turn.answer)",
        "turn.answer is None",
        "tests/test_gym.py::test_an_action_beside_an_answer_counts",
    ),
    Mutation(
        "gym: the first action counts",
        "mt_grpo/adapters/gym_text.py",
        "before, closed, _ = text.rpartition(CLOSE)",
        "before, closed, _ = text.partition(CLOSE)",
        "tests/test_gym.py::test_what_was_thought_is_no_action",
    ),
    Mutation(
        "gym: an action outside the space is played",
        "mt_grpo/adapters/gym_text.py",
        "if action is None or not contains(space, action):",
        "if action is None:",
        "tests/test_gym.py::test_each_space_takes_its_members_alone",
    ),
    Mutation(
        "gym: a text of the policy is the game's failure",
        "mt_grpo/adapters/gym_text.py",
        "        return bool(space.contains(action))\n    except (TypeError, ValueError, AttributeError, IndexError):",
        "        return bool(space.contains(action))\n    except ZeroDivisionError:",
        "tests/test_gym.py::test_what_other_spaces_take",
    ),
    Mutation(
        "gym: names begin at 0",
        "mt_grpo/adapters/gym_text.py",
        "int(space.start) + i",
        "i",
        "tests/test_gym.py::test_names_must_fit_the_space",
    ),
    Mutation(
        "gym: names that read alike are taken",
        "mt_grpo/adapters/gym_text.py",
        "if len(written) != len(actions) or",
        "if",
        "tests/test_gym.py::test_names_must_fit_the_space",
    ),
    Mutation(
        "gym: a half counts as a whole number",
        "mt_grpo/adapters/gym_text.py",
        "not np.issubdtype(space.dtype, np.floating) and not np.array_equal(array, wanted)",
        "False",
        "tests/test_gym.py::test_each_space_takes_its_members_alone",
    ),
    Mutation(
        "gym: infinity is played",
        "mt_grpo/adapters/gym_text.py",
        "or not np.isfinite(wanted).all()",
        "",
        "tests/test_gym.py::test_a_number_that_is_too_long_is_no_action",
    ),
    Mutation(
        "gym: texts count as numbers",
        "mt_grpo/adapters/gym_text.py",
        'array.dtype.kind not in ("b" if space.dtype == bool else "iuf") or',
        "",
        "tests/test_gym.py::test_each_space_takes_its_members_alone",
    ),
    Mutation(
        "gym: highlighting is not marked",
        "mt_grpo/adapters/gym_text.py",
        'COLOUR.sub("", HIGHLIGHTED.sub(r"[\\1]", drawn))',
        'COLOUR.sub("", drawn)',
        "tests/test_gym.py::test_an_episode_of_frozen_lake_by_hand",
    ),
    Mutation(
        "gym: colours stay",
        "mt_grpo/adapters/gym_text.py",
        'COLOUR.sub("", HIGHLIGHTED.sub(r"[\\1]", drawn))',
        'HIGHLIGHTED.sub(r"[\\1]", drawn)',
        "tests/test_gym.py::test_a_drawing_keeps_no_colours",
    ),
    Mutation(
        "verl: a column goes before the row's own argument",
        "mt_grpo/adapters/verl_rows.py",
        "return {**{name: row[column] for name, column in columns.items() if name not in given}, **given}",
        "return {**given, **{name: row[column] for name, column in columns.items()}}",
        "tests/test_verl.py::test_arguments_of_create_from_the_rows_columns",
    ),
    Mutation(
        "verl: a column that is missing is None",
        "mt_grpo/adapters/verl_rows.py",
        "if name not in given and row.get(column) is None]",
        "if False]",
        "tests/test_verl.py::test_arguments_of_create_from_the_rows_columns",
    ),
    Mutation(
        "sandbox: what a program started stays",
        "tools/python_sandbox.py",
        "            if process.poll() is None or not self.has_processes:",
        "            if process.poll() is None:",
        "tests/test_python_sandbox.py::test_nothing_stays_behind",
    ),
    Mutation(
        "sandbox: two trainers share users",
        "tools/python_sandbox.py",
        "                    os.close(file)\n                    continue",
        "                    pass",
        "tests/test_python_sandbox.py::test_programs_at_the_same_time_are_different_users",
    ),
    Mutation(
        "sandbox: forked processes share users",
        "tools/python_sandbox.py",
        "        os.register_at_fork(after_in_child=self._forget)",
        "        ",
        "tests/test_python_sandbox.py::test_a_forked_process_takes_users_of_its_own",
    ),
    Mutation(
        "sandbox: its folder stays",
        "tools/python_sandbox.py",
        "        finally:\n            self.delete(folder)",
        "        finally:\n            pass",
        "tests/test_python_sandbox.py::test_a_call_keeps_nothing_and_leaves_nothing",
    ),
    Mutation(
        "sandbox: what a killed trainer has left stays",
        "tools/python_sandbox.py",
        "            if user and processes_of(user):  # a trainer that was killed has left them",
        "            if False:",
        "tests/test_python_sandbox.py::test_what_a_killed_trainer_has_left_is_killed_by_the_next",
    ),
    Mutation(
        "sandbox: the program sees the first process of its namespace",
        "tools/python_sandbox.py",
        '[["--net", "--ipc", *OWN_PROCESSES], [*OWN_PROCESSES, "--mount-proc"]]',
        '[["--net", "--ipc", *OWN_PROCESSES, "--mount-proc"]]',
        "tests/test_python_sandbox.py::test_a_program_ends_with_a_trainer_that_is_killed",
    ),
    Mutation(
        "sandbox: folders of all are shared",
        "tools/python_sandbox.py",
        'own_folders = ["sh", "-c", OWN_FOLDERS, "sh"] if user and self.has_processes else []',
        "own_folders = []",
        "tests/test_python_sandbox.py::test_folders_of_all_are_its_own",
    ),
    Mutation(
        "sandbox: what is printed is kept back",
        "tools/python_sandbox.py",
        "sys.stdout.reconfigure(line_buffering=True)",
        "sys.stdout.flush()",
        "tests/test_python_sandbox.py::test_what_was_printed_is_read_when_the_time_is_over",
    ),
    Mutation(
        "sandbox: the program is not __main__",
        "tools/python_sandbox.py",
        'sys.modules["__main__"], sys.argv = main, ["program.py"]',
        'sys.argv = ["program.py"]',
        "tests/test_python_sandbox.py::test_what_a_program_prints",
    ),
    Mutation(
        "sandbox: its folder may be another's",
        "tools/python_sandbox.py",
        "or found.st_mode & 0o022:",
        "or False:",
        "tests/test_python_sandbox.py::test_its_folder_is_nobody_elses",
    ),
    Mutation(
        "sandbox: a program runs as root",
        "tools/python_sandbox.py",
        'as_user = [f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []',
        "as_user = []",
        "tests/test_python_sandbox.py::test_a_program_is_a_user_without_rights",
    ),
    Mutation(
        "sandbox: a program keeps root's groups",
        "tools/python_sandbox.py",
        'f"--regid={user}", "--clear-groups"] if user else []',
        'f"--regid={user}", "--keep-groups"] if user else []',
        "tests/test_python_sandbox.py::test_a_program_is_a_user_without_rights",
    ),
    Mutation(
        "sandbox: new privileges",
        "tools/python_sandbox.py",
        '*ends, "--no-new-privs", *as_user',
        "*ends, *as_user",
        "tests/test_python_sandbox.py::test_what_a_program_prints",
    ),
    Mutation(
        "sandbox: no limit of memory",
        "tools/python_sandbox.py",
        'f"--as={size}", ',
        "",
        "tests/test_python_sandbox.py::test_limits",
    ),
    Mutation(
        "sandbox: no limit of computing",
        "tools/python_sandbox.py",
        'f"--cpu={self.cpu_seconds}:{self.cpu_seconds + 1}", ',
        "",
        "tests/test_python_sandbox.py::test_limits",
    ),
    Mutation(
        "sandbox: no limit of output",
        "tools/python_sandbox.py",
        ', f"--fsize={FILE_BYTES}"]',
        "]",
        "tests/test_python_sandbox.py::test_limits",
    ),
    Mutation(
        "sandbox: no limit of open files",
        "tools/python_sandbox.py",
        'f"--nofile={FILES}", ',
        "",
        "tests/test_python_sandbox.py::test_limits",
    ),
    Mutation(
        "sandbox: no limit of processes",
        "tools/python_sandbox.py",
        '[f"--nproc={PROCESSES}"] if user or',
        "[] if user or",
        "tests/test_python_sandbox.py::test_processes_are_bounded",
    ),
    Mutation(
        "sandbox: two programs are one user",
        "tools/python_sandbox.py",
        "                return self._free.pop()",
        "                return self._free[-1]",
        "tests/test_python_sandbox.py::test_programs_at_the_same_time_are_different_users",
    ),
    Mutation(
        "sandbox: a program outlives its trainer",
        "tools/python_sandbox.py",
        '        ends = ["setpriv", "--pdeathsig", "KILL"]',
        '        ends = ["setpriv", "--pdeathsig", "clear"]',
        "tests/test_python_sandbox.py::test_a_program_ends_with_a_trainer_that_is_killed",
    ),
    Mutation(
        "sandbox: a program reads the trainer's environment",
        "tools/python_sandbox.py",
        "cwd=folder, env=environment,",
        "cwd=folder, env={**os.environ, **environment},",
        "tests/test_python_sandbox.py::test_what_a_program_prints",
    ),
    Mutation(
        "sandbox: what is required may be missing",
        "tools/python_sandbox.py",
        "                if name in required:",
        "                if False:",
        "tests/test_python_sandbox.py::test_what_is_not_allowed_is_said_or_refused",
    ),
    Mutation(
        "sandbox: what is missing is not said",
        "tools/python_sandbox.py",
        "                logger.warning(",
        "                logger.debug(",
        "tests/test_python_sandbox.py::test_what_is_not_allowed_is_said_or_refused",
    ),
    Mutation(
        "sandbox: a program that fails is a result",
        "tools/python_sandbox.py",
        "    if exit_code == 0:",
        "    if True:",
        "tests/test_python_sandbox.py::test_as_a_tool_of_a_conversation",
    ),
    Mutation(
        "verl: a tool's result is the user's where the format writes it so",
        "mt_grpo/adapters/verl_rows.py",
        'results = {id(message): result.text for message, result in pairs if message["role"] == "user"}',
        "results = {}",
        "tests/test_verl.py::test_an_interaction_and_a_tool_read_results_of_role_tool",
    ),
    Mutation(
        "verl: verl's own MCP class asks its own client",
        "mt_grpo/adapters/verl_mcp.py",
        "        owner._call_tool = ask_server",
        "        pass",
        "tests/test_verl.py::test_verls_own_mcp_tool_asks_the_servers_of_its_entry",
    ),
    Mutation(
        "verl: what an MCP server calls an error is parsed",
        "mt_grpo/adapters/verl_mcp.py",
        "    if result.is_error:",
        "    if False:",
        "tests/test_verl.py::test_verls_own_mcp_tool_asks_the_servers_of_its_entry",
    ),
    Mutation(
        "mcp: an address without a type is of the newer transport alone",
        "mt_grpo/adapters/mcp_servers.py",
        '["http", "sse"]',
        '["http"]',
        "tests/test_mcp.py::test_a_server_of_the_older_transport",
    ),
    Mutation(
        "tools: a parameter whose name Python does not take may be missing",
        "mt_grpo/tools.py",
        "        if missing:",
        "        if False:",
        "tests/test_environments.py::test_a_tool_may_have_parameters_whose_names_python_does_not_take",
    ),
    Mutation(
        "tools: beside names that Python does not take any name goes",
        "mt_grpo/tools.py",
        "        if unknown:",
        "        if False:",
        "tests/test_environments.py::test_a_tool_may_have_parameters_whose_names_python_does_not_take",
    ),
    Mutation(
        "verl: create_kwargs stay away from create",
        "mt_grpo/adapters/verl_environment.py",
        'kwargs = self._kwargs(tool, "create")',
        "kwargs = {}",
        "tests/test_verl.py::test_the_life_of_a_tool_and_the_rows_arguments",
    ),
    Mutation(
        "verl: create_kwargs never come under one name",
        "mt_grpo/adapters/verl_environment.py",
        '{"create_kwargs": kwargs}))',
        "{}))",
        "tests/test_verl.py::test_arguments_of_create_under_one_name",
    ),
    Mutation(
        "verl: the id that create gives is lost",
        "mt_grpo/adapters/verl_environment.py",
        'return given or own_id, ""',
        'return own_id, ""',
        "tests/test_verl.py::test_what_a_create_says_is_read_behind_the_prompt",
    ),
    Mutation(
        "verl: what a create says is lost",
        "mt_grpo/adapters/verl_environment.py",
        'return "\\n" + said if said else None',
        "return None",
        "tests/test_verl.py::test_what_a_create_says_is_read_behind_the_prompt",
    ),
    Mutation(
        "verl: a tool's reward is lost",
        "mt_grpo/adapters/verl_environment.py",
        "self.most_characters, self.truncate_side), reward=result.reward)",
        "self.most_characters, self.truncate_side))",
        "tests/test_verl.py::test_the_life_of_a_tool_and_the_rows_arguments",
    ),
    Mutation(
        "verl: a call is released never",
        "mt_grpo/adapters/verl_environment.py",
        "            if created:\n                await self._release(tool, own_id)",
        "            pass",
        "tests/test_verl.py::test_per_call_a_tool_is_new_each_time",
    ),
    Mutation(
        "verl: tools are created per trajectory whatever is asked",
        "mt_grpo/adapters/verl_environment.py",
        "for name in self.verl_tools if self.lifecycle == PER_TRAJECTORY else ():",
        "for name in self.verl_tools:",
        "tests/test_verl.py::test_per_call_a_tool_is_new_each_time",
    ),
    Mutation(
        "verl: a tool that is not selected is created",
        "mt_grpo/adapters/verl_environment.py",
        "if self.tool_selection is None or name in self.tool_selection:",
        "if True:",
        "tests/test_verl.py::test_a_row_selects_tools",
    ),
    Mutation(
        "verl: the interaction answers calls",
        "mt_grpo/adapters/verl_environment.py",
        "if turn.calls or self._interaction is None:",
        "if self._interaction is None:",
        "tests/test_verl.py::test_tools_go_before_the_interaction",
    ),
    Mutation(
        "verl: an interaction never ends a conversation",
        "mt_grpo/adapters/verl_environment.py",
        "stop=bool(over)",
        "stop=False",
        "tests/test_verl.py::test_an_interaction_answers_turns_without_a_call",
    ),
    Mutation(
        "verl: the score of a turn is lost",
        "mt_grpo/adapters/verl_environment.py",
        "stop=bool(over), reward=score",
        "stop=bool(over)",
        "tests/test_verl.py::test_an_interaction_answers_turns_without_a_call",
    ),
    Mutation(
        "verl: calculate_score is not asked",
        "mt_grpo/adapters/verl_environment.py",
        'if self._interaction is not None and overridden(self._interaction, "calculate_score"):',
        "if False:",
        "tests/test_verl.py::test_an_interaction_answers_turns_without_a_call",
    ),
    Mutation(
        "verl: calc_reward is not asked",
        "mt_grpo/adapters/verl_environment.py",
        'if overridden(self.verl_tools[tool], "calc_reward"):',
        "if False:",
        "tests/test_verl.py::test_the_life_of_a_tool_and_the_rows_arguments",
    ),
    Mutation(
        "verl: one release that raises stops the others",
        "mt_grpo/adapters/verl_environment.py",
        "results = await asyncio.gather(*steps, return_exceptions=True)",
        "results = [await step for step in steps]",
        "tests/test_verl.py::test_a_release_that_raises_stops_no_other",
    ),
    Mutation(
        "verl: tools run on the loop of the conversations",
        "mt_grpo/adapters/verl_tools.py",
        'run_aside(coroutine, "mt-grpo-verl")',
        'run_aside(coroutine, "mt-grpo-rollouts")',
        "tests/test_verl.py::test_a_tool_that_hangs_or_blocks_delays_no_conversation",
    ),
    Mutation(
        "verl: arguments are checked as a function's",
        "mt_grpo/adapters/verl_environment.py",
        "run.as_written = True",
        "run.as_written = False",
        "tests/test_verl.py::test_results_and_failures_of_tools",
    ),
    Mutation(
        "verl: None of a table is an argument",
        "mt_grpo/adapters/verl_rows.py",
        "return {key: without_none(each) for key, each in value.items() if each is not None}",
        "return {key: without_none(each) for key, each in value.items()}",
        "tests/test_verl.py::test_rows_of_a_table",
    ),
    Mutation(
        "verl: extra_info is not read",
        "mt_grpo/adapters/verl_rows.py",
        'rows = (row, row.get("extra_info") or {})',
        "rows = (row,)",
        "tests/test_verl.py::test_a_row_selects_tools",
    ),
    Mutation(
        "verl: left and right change places",
        "mt_grpo/adapters/verl_tools.py",
        '    if side == "left":',
        '    if side == "right":',
        "tests/test_verl.py::test_function_tools",
    ),
    Mutation(
        "verl: an image is read as nothing",
        "mt_grpo/adapters/verl_tools.py",
        "if response.image or response.video:",
        "if False:",
        "tests/test_verl.py::test_what_no_tool_returns_is_an_error",
    ),
    Mutation(
        "verl: a tuple of any length is a result",
        "mt_grpo/adapters/verl_tools.py",
        "if not 1 <= len(parts) <= 3:",
        "if len(parts) < 1:",
        "tests/test_verl.py::test_what_no_tool_returns_is_an_error",
    ),
    Mutation(
        "verl: two tools may have one name",
        "mt_grpo/adapters/verl_config.py",
        "            if name in tools:",
        "            if False:",
        "tests/test_verl.py::test_a_bad_yaml_is_refused",
    ),
    Mutation(
        "verl: a row's selection is not checked",
        "mt_grpo/environments.py",
        "                if names is not None:",
        "                if False:",
        "tests/test_verl.py::test_bad_rows_are_refused",
    ),
    Mutation(
        "verl: a row's selection is not kept",
        "mt_grpo/environments.py",
        "return tools if selection is None else selected(tools, selection)",
        "return tools",
        "tests/test_verl.py::test_a_row_selects_tools",
    ),
    Mutation(
        "mcp: a server that died is not started again",
        "mt_grpo/adapters/mcp_servers.py",
        "            if self.owner is owner:  # else",
        "            if False:  # else",
        "tests/test_mcp.py::test_a_server_that_dies_is_started_again",
    ),
    Mutation(
        "mcp: an error of a tool is a result",
        "mt_grpo/adapters/mcp_tools.py",
        "        if result.is_error:\n            raise McpToolError(text)",
        "",
        "tests/test_mcp.py::test_the_time_server",
    ),
    Mutation(
        "mcp: any number of calls at the same time",
        "mt_grpo/adapters/mcp_servers.py",
        "asyncio.Semaphore(concurrency)",
        "asyncio.Semaphore(999)",
        "tests/test_mcp.py::test_limits_of_calls",
    ),
    Mutation(
        "mcp: any number of calls per second",
        "mt_grpo/adapters/mcp_servers.py",
        "1 / (rate_limit or 1e9)",
        "1e-9",
        "tests/test_mcp.py::test_limits_of_calls",
    ),
    Mutation(
        "mcp: a selection takes all",
        "mt_grpo/adapters/mcp_tools.py",
        "if selection is not None and tool.name not in selection and",
        "if False and",
        "tests/test_mcp.py::test_the_git_server",
    ),
    Mutation(
        "mcp: two tools of one name",
        "mt_grpo/adapters/mcp_tools.py",
        "        if tool.name in chosen:",
        "        if False:",
        "tests/test_mcp.py::test_names_of_tools",
    ),
    Mutation(
        "mcp: a server outlives the trainer's end",
        "mt_grpo/adapters/mcp_servers.py",
        "closing = [server.close() for server in servers_to_close]",
        "closing = []",
        "tests/test_mcp.py::test_the_time_server",
    ),
    Mutation(
        "mcp: a start is given up with its call",
        "mt_grpo/adapters/mcp_servers.py",
        "asyncio.wait_for(asyncio.shield(self.ready), max",
        "asyncio.wait_for(self.ready, max",
        "tests/test_mcp.py::test_a_start_goes_on_where_its_call_is_given_up",
    ),
    Mutation(
        "mcp: variables that are not set",
        "mt_grpo/adapters/mcp_servers.py",
        "            if (braced or plain) not in os.environ:",
        "            if False:",
        "tests/test_mcp.py::test_variables_must_be_set",
    ),
    Mutation(
        "verl: a create that is given up is forgotten",
        "mt_grpo/adapters/verl_environment.py",
        "                except Exception:\n                    del self._ids[name]",
        "                except BaseException:\n                    del self._ids[name]",
        "tests/test_verl.py::test_a_create_that_is_given_up_is_released",
    ),
    Mutation(
        "verl: a reward may be NaN",
        "mt_grpo/adapters/verl_tools.py",
        "    if reward is not None and not is_number(reward):",
        "    if False:",
        "tests/test_verl.py::test_what_no_tool_returns_is_an_error",
    ),
    Mutation(
        "verl: a tool and an interaction of one name",
        "mt_grpo/adapters/verl_environment.py",
        "        if tool in interactions:",
        "        if False:",
        "tests/test_verl.py::test_names_that_clash_are_refused",
    ),
    Mutation(
        "tokens: what the backend read is not compared",
        "mt_grpo/token_checks.py",
        "            if generation.saw not in (None, before.digest()):",
        "            if False:",
        "tests/test_token_checks.py::test_a_turn_that_read_other_ids_is_found",
    ),
    Mutation(
        "tokens: what was sampled is not compared",
        "mt_grpo/token_checks.py",
        "        if turn.generations and turn.token_ids != ids[: len(turn.token_ids)]:",
        "        if False:",
        "tests/test_token_checks.py::test_a_fault_is_found_by_its_check",
    ),
    Mutation(
        "tokens: a mask is what it is",
        "mt_grpo/token_checks.py",
        "    if mask == expected:",
        "    if True:",
        "tests/test_token_checks.py::test_a_shifted_mask_is_found",
    ),
    Mutation(
        "tokens: texts are not compared",
        "mt_grpo/token_checks.py",
        "            found += [\n                each for each in texts",
        "            found += [\n                each for each in []",
        "tests/test_token_checks.py::test_a_fault_is_found_by_its_check",
    ),
    Mutation(
        "tokens: white space always passes",
        "mt_grpo/token_checks.py",
        '(mode == "ignore_strippable" and each.kind == WHITE_SPACE)',
        "(each.kind == WHITE_SPACE)",
        "tests/test_token_checks.py::test_white_space_passes_where_it_may",
    ),
    Mutation(
        "tokens: white space never passes",
        "mt_grpo/token_checks.py",
        '(mode == "ignore_strippable" and each.kind == WHITE_SPACE)',
        "False",
        "tests/test_token_checks.py::test_white_space_passes_where_it_may",
    ),
    Mutation(
        "tokens: what a template does itself is told",
        "mt_grpo/token_checks.py",
        "                if each.key not in passed\n",
        "                if True\n",
        "tests/test_token_checks.py::test_what_a_template_does_itself_is_not_told",
    ),
    Mutation(
        "tokens: nothing is raised",
        "mt_grpo/token_checks.py",
        "    if errors and args.tokenization_check_raises:",
        "    if False:",
        "tests/test_token_checks.py::test_a_kind_is_told_once_and_raised_where_asked",
    ),
    Mutation(
        "tokens: a kind is told each time",
        "mt_grpo/token_checks.py",
        "            told.add(kind)\n",
        "",
        "tests/test_token_checks.py::test_a_kind_is_told_once_and_raised_where_asked",
    ),
    Mutation(
        "tokens: the in-process backend gives no account",
        "mt_grpo/in_process.py",
        "hash_of_ids(prompt_ids)",
        "None",
        "tests/test_token_checks.py::test_backends_give_an_account",
    ),
    Mutation(
        "tokens: the server's account is not read",
        "mt_grpo/server_errors.py",
        "None if read is None else hash_of_ids(read)",
        "None",
        "tests/test_token_checks.py::test_backends_give_an_account",
    ),
    Mutation(
        "tokens: the history is appended where it is to be rendered anew",
        "mt_grpo/adapter_keys.py",
        "    if not script_args.use_inference_chat_template:",
        "    if True:",
        "tests/test_token_checks.py::test_the_history_is_rendered_anew_before_each_turn",
    ),
    Mutation(
        "tokens: what is rendered anew is read twice",
        "mt_grpo/adapters/inference_template.py",
        "        history, read = rollout.history, len(turn.observation_ids)\n        turn.observation_ids = []",
        "        history, read = rollout.history, len(turn.observation_ids)\n        turn.observation_ids = list(turn.observation_ids)",
        "tests/test_token_checks.py::test_the_history_is_rendered_anew_before_each_turn",
    ),
    Mutation(
        "openenv: a late session stays open",
        "mt_grpo/adapters/swift_openenv.py",
        "if uuid not in self._contexts:",
        "if False:",
        "tests/test_openenv.py::test_a_session_that_opens_too_late_is_closed",
    ),
    Mutation(
        "openenv: a row's None goes before the defaults",
        "mt_grpo/adapters/swift_openenv.py",
        '**without_none(row.get("env_config") or {})',
        '**(row.get("env_config") or {})',
        "tests/test_openenv.py::test_keys_that_only_other_rows_have_say_nothing",
    ),
    Mutation(
        "openenv: all sessions open at once",
        "mt_grpo/adapters/swift_openenv.py",
        "asyncio.Semaphore(self.max_concurrent_envs)",
        "asyncio.Semaphore(64)",
        "tests/test_openenv.py::test_so_many_sessions_open_at_a_time",
    ),
    Mutation(
        "openenv: a step blocks the loop",
        "mt_grpo/adapters/swift_openenv.py",
        "await called(env.step, action)",
        "env.step(action)",
        "tests/test_openenv.py::test_a_session_is_played_and_closed",
    ),
]

MUTATIONS = [
    *REWARDS_AND_CREDIT, *SERVER_AND_WEIGHTS, *CONVERSATION_AND_TOOLS, *CONFIGURATION_AND_DATA,
    *STOPPING_AND_RESUMING, *AGENTS, *SWIFT, *GYM,
]  # fmt: skip


def apply(mutation: Mutation, root: Path) -> None:
    """Change the file below `root`. Raises `ValueError` where the anchor does not stand there exactly once."""
    path = root / mutation.file
    text = path.read_text(encoding="utf-8")
    if (count := text.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.name}: the anchor stands {count} times in {mutation.file}, expected once.")
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")


def copy_tracked(target: Path) -> None:
    """The files that git tracks, and new ones that it does not ignore, as they are in the working tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def start_tests(tests: list[str], root: Path, output: Path) -> int:
    """Run these node ids in a copy of the project, in a forked process; returns its id.

    The libraries are imported once, before the first fork: they take longer than most tests. Nothing of the project
    is imported in the parent.
    """
    pid = os.fork()
    if pid:
        return pid
    os.setsid()  # what the tests start ends with them
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(root)
    os.environ |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path[:] = [
        str(root),
        *(path for path in sys.path if Path(path or ".").resolve() not in (ROOT, ROOT / "tests")),
    ]
    import pytest

    code = 3
    try:
        code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "", *tests]))
    finally:
        sys.stdout.flush()
        os._exit(code)


@dataclass
class Run:
    """The tests of one mutation, or of none, under way."""

    mutation: Mutation | None
    tests: list[str]

    def __post_init__(self):
        self.began = time.perf_counter()
        self.folder = Path(tempfile.mkdtemp(prefix="mt-grpo-mutation-"))
        copy_tracked(self.folder / "copy")
        if self.mutation is not None:
            apply(self.mutation, self.folder / "copy")
        self.pid = start_tests(self.tests, self.folder / "copy", self.folder / "output")
        self.code: int | None = None

    def poll(self) -> bool:
        """Whether the tests are over; what they left running is ended."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid and time.perf_counter() - self.began < TIMEOUT:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if not pid:
            os.waitpid(self.pid, 0)
        self.code = os.waitstatus_to_exitcode(status) if pid else 124
        self.seconds = time.perf_counter() - self.began
        self.output = (self.folder / "output").read_text(errors="replace")
        shutil.rmtree(self.folder, ignore_errors=True)
        return True

    @property
    def as_expected(self) -> bool:
        """Tests pass without a mutation, and fail with one: 1 says so, and 2 to 5 that they did not run."""
        return self.code == (0 if self.mutation is None else 1)

    @property
    def last_words(self) -> str:
        failed = re.findall(r"^(?:FAILED|ERROR) .*$", self.output, re.M)
        return "\n".join(failed) or self.output[-1500:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutations whose names contain one of them")
    parser.add_argument("--only-mutations", action="store_true", help="not the tests on the code as it is")
    parser.add_argument("--jobs", type=int, default=2, help="copies at the same time")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.words or any(word in m.name for word in options.words)]
    if not chosen:
        sys.exit(f"error: no mutation's name contains one of {options.words}.")
    for library in warm_python.LIBRARIES:
        importlib.import_module(library)
    warm_python.executable()  # one for all copies
    tests = sorted({test for mutation in chosen for test in mutation.test.split()})
    waiting = [(None, tests)] * (not options.only_mutations) + [(m, m.test.split()) for m in chosen]
    running: list[Run] = []
    survived, done = [], 0
    while waiting or running:
        while waiting and len(running) < options.jobs:
            running.append(Run(*waiting.pop(0)))
        for run in [run for run in running if run.poll()]:
            running.remove(run)
            done += run.mutation is not None
            name = run.mutation.name if run.mutation else "without a mutation"
            verdict = "passed" if run.mutation is None else "noticed"
            print(
                f"{done}/{len(chosen)} {verdict if run.as_expected else 'NOT ' + verdict}: {name} ({run.seconds:.0f} s)"
            )
            print("    " + run.last_words.splitlines()[-1][:150] if run.as_expected else run.last_words, flush=True)
            if not run.as_expected:
                survived.append(name)
        time.sleep(0.1)
    print(
        f"{len(chosen) - len([n for n in survived if n != 'without a mutation'])} of {len(chosen)} mutations were noticed."
    )
    if survived:
        sys.exit("error: not as expected: " + "; ".join(survived))


if __name__ == "__main__":
    main()

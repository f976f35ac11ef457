"""Faults put into the code on purpose. Each one must make the test that is named beside it fail.

    bash scripts/test.sh --mutations                 # all of them, two at a time
    bash scripts/test.sh --mutations columns paused  # those whose names contain one of the words

Every mutation is applied to a fresh copy of the tracked files. The named tests must pass on a copy without a mutation,
and fail (not: fail to be collected) on the copy with it. tests/test_mutations.py holds that every anchor still stands
in its file exactly once, so that a mutation cannot rot unnoticed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

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
COPIES = "tests/test_batch.py::test_a_reward_that_changes_its_arguments_changes_nothing_else"

REWARDS_AND_CREDIT: list[Mutation] = [
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
        '"prompts": prompts, "completions": completions, "completion_ids"',
        '"prompts": prompts[::-1], "completions": completions, "completion_ids"',
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
        SCRIPT,
        "[rollout.prompt_ids for rollout in rollouts], [rollout.completion_ids",
        "[rollout.prompt_ids for rollout in rollouts[::-1]], [rollout.completion_ids",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "restarted rollouts take each other's places",
        SCRIPT,
        "for i, rollout in zip(which, rollouts):",
        "for i, rollout in zip(which[::-1], rollouts):",
        "tests/test_batch.py::test_rollouts_are_graded_by_their_own_rows",
    ),
    Mutation(
        "restarted rollouts get the first prompts",
        SCRIPT,
        "self.env.start([prompts[i] for i in which])",
        "self.env.start(prompts[: len(which)])",
        f"{BATCH}[turn_return]",
    ),
    Mutation(
        "a rollout's index is that within its rank",
        SCRIPT,
        "rollout.index = self.accelerator.process_index * len(prompts) + i",
        "rollout.index = i",
        RANKS,
    ),
    Mutation(
        "a turn's None is 0",
        SCRIPT,
        "[[NAN if v is None else float(v) for v in row] for row in rows]",
        "[[0.0 if v is None else float(v) for v in row] for row in rows]",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "a rollout's None is 0",
        SCRIPT,
        "torch.tensor([NAN if isinstance(v, missing) else float(v) for v in values])",
        "torch.tensor([NAN if isinstance(v, (list, tuple)) else float(v or 0) for v in values])",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "an outcome of None is 0",
        SCRIPT,
        "outcome=nansum(whole[:, self.num_turn_funcs :] * outcome_weights, 1)",
        "outcome=(whole[:, self.num_turn_funcs :] * outcome_weights).nansum(1)",
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
        "outcome=nansum(whole[:, self.num_turn_funcs :] * outcome_weights, 1)",
        "outcome=nansum(whole[:, self.num_turn_funcs :], 1)",
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
        SCRIPT,
        "has_observation = [[turn.observation is not None for",
        "has_observation = [[turn.tool_call is not None for",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "a turn that was not sampled counts in the returns",
        SCRIPT,
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
        "num_turns = int(self.accelerator.gather(torch.tensor([num_turns], device=device)).max())",
        "num_turns = int(num_turns)",
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
        SCRIPT,
        "first = rank * len(self._rollouts)",
        "first = 0",
        RANKS,
    ),
    Mutation(
        "the log has the answer of another row",
        SCRIPT,
        '"answer": inputs[i].get("answer")',
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
        'group_size = self.num_generations if mode == "train" else self.num_generations_eval\n        advantages',
        "group_size = self.num_generations\n        advantages",
        f"{BATCH}[evaluation]",
    ),
    Mutation(
        "scale_rewards is ignored",
        SCRIPT,
        "self.turn_advantage_coef, self.scale_rewards,\n            self.args",
        'self.turn_advantage_coef, "group",\n            self.args',
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "scale_rewards is always none",
        SCRIPT,
        "self.turn_advantage_coef, self.scale_rewards,\n            self.args",
        'self.turn_advantage_coef, "none",\n            self.args',
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
        "            self.args.turn_discount,\n        )  # fmt: skip\n        first",
        "            1.0,\n        )  # fmt: skip\n        first",
        f"{BATCH}[turn_return]",
    ),
    Mutation(
        "credit goes to the turn before",
        SCRIPT,
        "owners += (k, -1)",
        "owners += (max(k - 1, 0), -1)",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "results have the credit of their calls",
        SCRIPT,
        "owners += (k, -1)",
        "owners += (k, k)",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "results of tools are trained on",
        SCRIPT,
        "for part in ([1] * len(t.token_ids), [0] * len(t.observation_ids))",
        "for part in ([1] * len(t.token_ids), [1] * len(t.observation_ids))",
        f"{BATCH}[mt_grpo]",
    ),
    Mutation(
        "logprobs leave out the results",
        SCRIPT,
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
        'metrics["completions/clipped_ratio"].append(truncated.float().mean().item())',
        'metrics["completions/clipped_ratio"].append('
        "sum(r.completion_ids[-1] not in self.eos_token_ids for r in rollouts) / len(rollouts))",
        TRUNCATED,
    ),
    Mutation(
        "clipped_ratio leaves out a full context",
        SCRIPT,
        " | (stop == reasons.index(StopReason.CONTEXT_LENGTH))",
        "",
        TRUNCATED,
    ),
    Mutation(
        "the template's end of turn is not in eos_token_ids",
        SCRIPT,
        "sorted({*self.eos_token_ids, *env.end_of_turn_ids(tokenizer)})",
        "sorted(self.eos_token_ids)",
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
        SCRIPT,
        "load_rows(script_args.dataset_name, test_split, script_args.eval",
        "load_rows(script_args.dataset_name, train_split, script_args.eval",
        "tests/test_batch.py::test_evaluation_is_by_the_test_file",
    ),
    Mutation(
        "every split of a folder is train.jsonl",
        SCRIPT,
        'Path(name) / f"{split}.jsonl"',
        'Path(name) / "train.jsonl"',
        "tests/test_batch.py::test_evaluation_is_by_the_test_file",
    ),
    Mutation(
        "generated test problems are of the train split",
        SCRIPT,
        'seed=0 if split == "train" else 1, split=split)',
        'seed=0 if split == "train" else 1, split="train")',
        "tests/test_batch.py::test_evaluation_is_by_generated_problems_that_are_held_out",
    ),
    Mutation(
        "generated train problems are of both splits",
        SCRIPT,
        'if (zlib.crc32(expression.encode()) % 10 == 0) == (split == "test"):',
        'if zlib.crc32(expression.encode()) % 10 == 0 or split == "train":',
        "tests/test_batch.py::test_evaluation_is_by_generated_problems_that_are_held_out"
        " tests/test_batch.py::test_no_generated_problem_is_in_both_splits[make_arithmetic]",
    ),
    Mutation(
        "generated chains are of both splits",
        SCRIPT,
        'if held_out == (split == "test") and all',
        'if (held_out or split == "train") and all',
        "tests/test_batch.py::test_no_generated_problem_is_in_both_splits[make_chain]",
    ),
    Mutation(
        "rewards in a thread get what is trained",
        SCRIPT,
        "return func(**own_copy(kwargs))",
        "return func(**kwargs)",
        f"{COPIES}[mt_grpo]",
    ),
    Mutation(
        "async rewards get what is trained",
        SCRIPT,
        "run_tool(func, own_copy(columns), timeout)",
        "run_tool(func, columns, timeout)",
        f"{COPIES}[mt_grpo]",
    ),
    Mutation(
        "turns that rewards get are not copied",
        SCRIPT,
        "COPIED = {list, tuple, dict, Turn, ToolCall}",
        "COPIED = {list, tuple, dict, ToolCall}",
        f"{COPIES}[mt_grpo]",
    ),
    Mutation(
        "objects that rewards get are copied",
        SCRIPT,
        "        return copied\n    return value\n",
        "        return copied\n    return copy.copy(value)\n",
        "tests/test_batch.py::test_reward_functions_get_copies_of_plain_data_and_other_objects_themselves",
    ),
    Mutation(
        "rewards of another scale per turn index and group",
        SCRIPT,
        "per_turn = norm(rewards.turn.where(rewards.observed, NAN), group_size",
        "per_turn = norm(rewards.turn, group_size",
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
        SCRIPT,
        "in zip(batch, generations, strict=True):\n            if not future",
        "in zip(batch, generations[::-1], strict=True):\n            if not future",
        "tests/test_batch.py::test_a_conversation_gets_its_own_samples",
    ),
    Mutation(
        "a sample is not cut to its own budget",
        SCRIPT,
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
]

SERVER_AND_WEIGHTS: list[Mutation] = []

CONVERSATION_AND_TOOLS: list[Mutation] = []

CONFIGURATION_AND_DATA: list[Mutation] = []

STOPPING_AND_RESUMING: list[Mutation] = []

MUTATIONS = [
    *REWARDS_AND_CREDIT, *SERVER_AND_WEIGHTS, *CONVERSATION_AND_TOOLS, *CONFIGURATION_AND_DATA,
    *STOPPING_AND_RESUMING,
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


def run_tests(tests: list[str], root: Path) -> tuple[int, str]:
    """(pytest's exit code, its output) for these node ids in a copy of the project."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "", *tests]
    try:
        result = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT, start_new_session=True
        )
    except subprocess.TimeoutExpired as error:
        return 124, str(error.stdout or "")[-3000:]
    return result.returncode, result.stdout[-3000:]


def try_one(mutation: Mutation | None, tests: list[str]) -> tuple[bool, str, float]:
    """(as expected, pytest's last words, seconds) of one copy; without a mutation the tests must pass."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mt-grpo-mutation-") as folder:
        copy = Path(folder)
        copy_tracked(copy)
        if mutation is not None:
            apply(mutation, copy)
        code, output = run_tests(tests, copy)
    expected = 0 if mutation is None else 1  # 1: tests ran and failed; 2 to 5: they did not run
    failed = re.findall(r"^(?:FAILED|ERROR) .*$", output, re.M)
    return code == expected, "\n".join(failed) or output[-1500:], time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutations whose names contain one of them")
    parser.add_argument("--jobs", type=int, default=2, help="copies at the same time")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.words or any(word in m.name for word in options.words)]
    if not chosen:
        sys.exit(f"error: no mutation's name contains one of {options.words}.")
    tests = sorted({test for mutation in chosen for test in mutation.test.split()})
    good, words, seconds = try_one(None, tests)
    print(f"without a mutation: {'passed' if good else 'FAILED'} in {seconds:.0f} s", flush=True)
    if not good:
        sys.exit(f"error: the named tests must pass before anything is changed.\n{words}")
    survived = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        runs = {pool.submit(try_one, mutation, mutation.test.split()): mutation for mutation in chosen}
        for number, run in enumerate(concurrent.futures.as_completed(runs), 1):
            noticed, words, seconds = run.result()
            print(f"{number}/{len(chosen)} {'noticed ' if noticed else 'SURVIVED'} {runs[run].name} ({seconds:.0f} s)")
            print("    " + words.splitlines()[-1][:150] if noticed else words, flush=True)
            if not noticed:
                survived.append(runs[run].name)
    print(f"{len(chosen) - len(survived)} of {len(chosen)} mutations were noticed.")
    if survived:
        sys.exit("error: nothing noticed: " + "; ".join(survived))


if __name__ == "__main__":
    main()

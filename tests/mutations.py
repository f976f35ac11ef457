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


REWARDS_AND_CREDIT: list[Mutation] = []

SERVER_AND_WEIGHTS: list[Mutation] = []

CONVERSATION_AND_TOOLS: list[Mutation] = [
    Mutation(
        "sampled ids are encoded again from their text",
        SCRIPT,
        "        ids = generation.token_ids[:length]\n",
        '        ids = tokenizer(tokenizer.decode(generation.token_ids[:length]))["input_ids"]\n',
        "tests/test_conversation.py::test_one_token_that_holds_more_than_the_tag_is_kept_whole",
    ),
    Mutation(
        "logprobs are not cut with their ids",
        SCRIPT,
        "generation.logprobs and generation.logprobs[:length]",
        "generation.logprobs",
        "tests/test_conversation.py::test_one_token_that_holds_more_than_the_tag_is_kept_whole",
    ),
    Mutation(
        "a sampled end of turn is added once more",
        SCRIPT,
        "        return ids[1:] if sampled and ids[0] == sampled[-1] and ids[0] in tokenizer.all_special_ids else ids",
        "        return ids",
        "tests/test_conversation.py::test_message_ids",
    ),
    Mutation(
        "observations are trained on",
        SCRIPT,
        "([1] * len(t.token_ids), [0] * len(t.observation_ids))",
        "([1] * len(t.token_ids), [1] * len(t.observation_ids))",
        "tests/test_conversation.py::test_two_turns_in_numbers",
    ),
    Mutation(
        "observations are credited to their turn",
        SCRIPT,
        "([k] * len(t.token_ids), [-1] * len(t.observation_ids))",
        "([k] * len(t.token_ids), [k] * len(t.observation_ids))",
        "tests/test_conversation.py::test_two_turns_in_numbers",
    ),
    Mutation(
        "a turn may be a token longer than the completion",
        SCRIPT,
        "budget = min(completion_left, context_left, self.max_turn_tokens or completion_left)",
        "budget = min(completion_left + 1, context_left, self.max_turn_tokens or completion_left + 1)",
        "tests/test_conversation.py::test_max_completion_length_counts_tool_results",
    ),
    Mutation(
        "a turn may be a token longer than the context",
        SCRIPT,
        "budget = min(completion_left, context_left, self.max_turn_tokens",
        "budget = min(completion_left, context_left + 1, self.max_turn_tokens",
        "tests/test_conversation.py::test_max_model_len_bounds_every_request",
    ),
    Mutation(
        "one more observation than max_env_steps",
        SCRIPT,
        "for t in rollout.turns) >= self.max_steps:",
        "for t in rollout.turns) > self.max_steps:",
        "tests/test_conversation.py::test_max_steps_counts_observations_and_leaves_a_turn_to_answer",
    ),
    Mutation(
        "a mistaken call does not count as an observation",
        SCRIPT,
        "sum(t.observation is not None for t in rollout.turns) >= self.max_steps",
        "sum(t.observation is not None and t.error is None for t in rollout.turns) >= self.max_steps",
        "tests/test_conversation.py::test_max_steps_counts_observations_and_leaves_a_turn_to_answer",
    ),
    Mutation(
        "a result is cut without a marker",
        SCRIPT,
        '.rstrip("\\ufffd") + marker',
        '.rstrip("\\ufffd")',
        "tests/test_conversation.py::test_cut_to_tokens",
    ),
    Mutation(
        "a cut leaves half a letter",
        SCRIPT,
        '.rstrip("\\ufffd") + marker',
        " + marker",
        "tests/test_conversation.py::test_cut_to_tokens",
    ),
    Mutation(
        "a call that is cut off ends the conversation",
        SCRIPT,
        'elif turn.tool_call is None and turn.finish_reason == "length":',
        'elif turn.finish_reason == "length":',
        "tests/test_conversation.py::test_a_call_cut_off_by_the_turn_budget_is_an_observation",
    ),
    Mutation(
        "a turn that its tag ended counts as cut off",
        SCRIPT,
        'reason = "stop" if length < len(generation.token_ids) else generation.finish_reason',
        "reason = generation.finish_reason",
        "tests/test_conversation.py::test_a_call_before_the_budget_is_spent_ended_by_its_tag",
    ),
    Mutation(
        "tags inside thinking are taken for a call",
        SCRIPT,
        'for tag in ("</think>", "</reasoning>") if tag in text[:end]',
        "for tag in () if tag in text[:end]",
        "tests/test_conversation.py::test_parse_turn",
    ),
    Mutation(
        "the last closing tag counts",
        SCRIPT,
        "    end = min((text.find(tag) for tag in CLOSING_TAGS",
        "    end = max((text.find(tag) for tag in CLOSING_TAGS",
        "tests/test_conversation.py::test_parse_turn",
    ),
    Mutation(
        "a state key sees its own turn",
        SCRIPT,
        "turn.state_key = self._state_key(rollout.turns)",
        "turn.state_key = self._state_key([*rollout.turns, turn])",
        "tests/test_trainer.py::test_the_environment_names_the_state_in_which_each_turn_begins",
    ),
    Mutation(
        "a result closes its own tag",
        SCRIPT,
        'control = {"</result>", *(t for',
        "control = {*(t for",
        "tests/test_conversation.py::test_neutralise_leaves_other_text_alone",
    ),
    Mutation(
        "added tokens that are text are broken as well",
        SCRIPT,
        "*(t for t, special in tokens.items() if is_control(t, special, template))",
        "*tokens",
        "tests/test_conversation.py::test_a_text_without_control_tokens_is_left_as_it_is",
    ),
    Mutation(
        "control tokens that are not special are left",
        SCRIPT,
        "if is_control(t, special, template))",
        "if special)",
        "tests/test_conversation.py::test_a_neutralised_text_holds_no_control_token",
    ),
    Mutation(
        "a control token inside another is left",
        SCRIPT,
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
        SCRIPT,
        '            warn_of_control_tokens(env, split, "train_dataset"',
        '            len("train_dataset"',
        "tests/test_trainer.py::test_prompts_with_control_tokens_are_told_before_training",
    ),
    Mutation(
        "the next turn does not see the result",
        SCRIPT,
        "        history = rollout.prompt_ids + rollout.completion_ids\n",
        "        history = rollout.prompt_ids + join(turn.token_ids for turn in rollout.turns)\n",
        "tests/test_conversation.py::test_two_turns_in_numbers",
    ),
    Mutation(
        "a result leaves no room to answer",
        SCRIPT,
        "room = min(completion_left, context_left) - self.MIN_ANSWER_TOKENS",
        "room = min(completion_left, context_left)",
        "tests/test_conversation.py::test_a_long_result_is_cut_so_that_an_answer_fits",
    ),
    Mutation(
        "a full context is called a spent budget",
        SCRIPT,
        "        full = context_left < completion_left\n",
        "        full = False\n",
        "tests/test_conversation.py::test_stop_reasons",
    ),
    Mutation(
        "the policy's mistake counts as the tool's",
        SCRIPT,
        'return f"Error: {mistake}", "call", 0.0',
        'return f"Error: {mistake}", "tool", 0.0',
        "tests/test_conversation.py::test_the_policys_mistakes_become_observations",
    ),
    Mutation(
        "a sample keeps the budget of its batch",
        SCRIPT,
        "ids = list(token_ids[i][:max_tokens])",
        "ids = list(token_ids[i])",
        "tests/test_conversation.py::test_each_sample_is_cut_to_its_own_budget",
    ),
    Mutation(
        "batches are in the order of arrival",
        SCRIPT,
        "self.batches.put(sorted(self.waiting, key=lambda request: request[0]))",
        "self.batches.put(self.waiting)",
        "tests/test_conversation.py::test_samples_do_not_depend_on_timing",
    ),
    Mutation(
        "a result without data becomes an address",
        SCRIPT,
        '    raise TypeError(f"the tool returned {type(value).__name__}, which',
        '    return str(value)\n    raise TypeError(f"the tool returned {type(value).__name__}, which',
        "tests/test_conversation.py::test_a_result_is_data_or_an_error",
    ),
    Mutation(
        "sets of results have the order of their hashes",
        SCRIPT,
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
        SCRIPT,
        "            if self._busy[loop]:\n                waiting",
        "            if False:\n                waiting",
        "tests/test_conversation.py::test_calls_wait_for_a_process_where_no_more_can_be_started",
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
        "elements of an argument are not looked at",
        SCRIPT,
        "    if origin in LISTS and isinstance(value, list):\n        parts = enumerate(value) if options else ()",
        "    if origin in LISTS and isinstance(value, list):\n        parts = ()",
        "tests/test_conversation.py::test_what_is_wrong_inside_an_argument",
    ),
    Mutation(
        "a parameter that no JSON fits is taken",
        SCRIPT,
        "    if not takes_json(hints[name]):",
        "    if False:",
        "tests/test_conversation.py::test_a_parameter_that_no_json_fits_is_refused",
    ),
]

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

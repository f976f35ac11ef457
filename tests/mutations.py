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

SERVER_AND_WEIGHTS: list[Mutation] = [
    Mutation("pushes that a server ignores are not looked for", SCRIPT,
             "        if self._num_syncs == 0:\n            self._check_that_pushes_arrive(version)\n", "",
             "tests/test_faults.py::test_a_server_with_other_weights_is_noticed_before_a_rollout"),
    Mutation("float32 logprobs may be 0.1 off", SCRIPT,
             'return 1e-3 if self.model.dtype == torch.float32 and self._server_dtype == "float32" else 0.1',
             "return 0.1", "tests/test_faults.py::test_a_server_with_other_weights_is_noticed_before_a_rollout"),
    Mutation("no prefix cache is reset", SCRIPT,
             'answer = self.request("POST", "/reset_prefix_cache")\n', "answer = {}\n",
             "tests/test_faults.py::test_what_a_step_asks_its_server_for"),
    Mutation("no pause", SCRIPT,
             'self.request("POST", "/pause", timeout=self.request_timeout, params={"mode": "wait"})', "pass",
             "tests/test_faults.py::test_what_a_step_asks_its_server_for"),
    Mutation("neither pause nor reset", SCRIPT,
             'self.request("POST", "/pause", timeout=self.request_timeout, params={"mode": "wait"})\n'
             "            # A load that fails half-way leaves a version that nobody expects, so that nobody "
             "samples from it.\n"
             '            self.request("POST", "/update_weight_version", json={"new_version": f"loading-{version}"})\n'
             "            load()\n"
             '            answer = self.request("POST", "/reset_prefix_cache")\n',
             "load()\n            answer = {}\n",
             "tests/test_faults.py::test_keys_of_old_weights_do_not_outlive_a_push"),
    Mutation("a pause that aborts", SCRIPT, ', params={"mode": "wait"})', ")",
             "tests/test_faults.py::test_what_a_step_asks_its_server_for"),
    Mutation("no version while it loads", SCRIPT,
             'self.request("POST", "/update_weight_version", json={"new_version": f"loading-{version}"})', "pass",
             "tests/test_faults.py::test_a_push_that_ends_half_way_leaves_a_version_that_nobody_expects"),
    Mutation("a refused cache reset is taken as done", SCRIPT, 'if answer.get("success") is False:', "if not answer:",
             "tests/test_faults.py::test_a_push_that_ends_half_way_leaves_a_version_that_nobody_expects"),
    Mutation("a push does not wait for what is in the air", SCRIPT,
             "with self._interruptions():\n                    self._flight.wait()",
             "with self._interruptions():\n                    pass",
             "tests/test_faults.py::test_overlapping_rollouts_are_one_step_behind"),
    Mutation("evaluations are sampled one push behind", SCRIPT,
             'if self.backend != "server" or self._pushed == version:',
             'if self.backend != "server" or self._pushed == version or not self.model.training:',
             "tests/test_faults.py::test_overlapping_rollouts_are_one_step_behind"),
    Mutation("rollouts of other prompts are taken", SCRIPT,
             "if flight is not None and flight.prompts != prompts:",
             "if flight is not None and len(flight.prompts) != len(prompts):",
             "tests/test_faults.py::test_rollouts_in_the_air_are_of_the_prompts_that_are_trained"),
    Mutation("versions are confirmed when the answer is there", SCRIPT, "confirmed = asked",
             "confirmed = time.monotonic()",
             "tests/test_client.py::test_an_answer_proves_only_what_was_finished_when_it_was_asked_for"),
    Mutation("any version that begins so will do", SCRIPT, "if held == version:\n",
             "if held is not None and held.startswith(version):\n",
             "tests/test_client.py::test_only_the_very_version_counts"),
    Mutation("a version that ends so will do", SCRIPT, "if held == version:\n",
             "if held is not None and held.endswith(version):\n",
             "tests/test_client.py::test_only_the_very_version_counts"),
    Mutation("a server that lost its weights keeps its rollouts", SCRIPT, "if held == version:\n",
             "if held is not None:\n", "tests/test_client.py::test_only_the_very_version_counts"),
    Mutation("ranks do not wait for the push", SCRIPT, "        return self._on_main(push)\n",
             "        self._on_main(dict)\n"
             "        return push() if self.accelerator.is_main_process else {}\n",
             "tests/test_server.py::test_two_ranks_on_one_server"),
    Mutation("ranks expect versions of their own", SCRIPT,
             "self.client.instance = self._on_main(lambda: self.client.instance)", "self._on_main(dict)",
             "tests/test_server.py::test_two_ranks_on_one_server"),
    Mutation("a version has its name before its file is whole", SCRIPT, 'folder.with_name(f"partial-{version}")',
             "folder", "tests/test_faults.py::test_what_has_a_versions_name_is_complete"),
    Mutation("the probe's norm stays in the policy", SCRIPT, "tensor = tensor * norm_scale",
             "tensor = tensor.mul_(norm_scale)", "tests/test_faults.py::test_what_a_step_asks_its_server_for"),
    Mutation("the probe's norm stays on the server", SCRIPT,
             "seconds, every = self._push(version), self.args.weight_check_every",
             "seconds, every = {}, self.args.weight_check_every",
             "tests/test_faults.py::test_what_a_step_asks_its_server_for"),
    Mutation("tied names are dropped", SCRIPT, "for alias in (name, *sorted(self._tied.get(name, ()))):",
             "for alias in (name,):",
             "tests/test_trainer.py::test_weights_of_a_lora_are_exact_and_the_model_untouched"),
    Mutation("tied names are neither sent nor expected", SCRIPT, "named_parameters(remove_duplicate=False)",
             "named_parameters()", "tests/test_trainer.py::test_weights_of_a_lora_are_exact_and_the_model_untouched"),
    Mutation("lora is not merged", SCRIPT, "        layer.merge()\n", "",
             "tests/test_trainer.py::test_weights_of_a_lora_are_exact_and_the_model_untouched"),
    Mutation("merged weights drift", SCRIPT, "            parameter.data.copy_(saved[name])", "            pass",
             "tests/test_trainer.py::test_weights_of_a_lora_are_exact_and_the_model_untouched"),
    Mutation("missing weights are pushed without", SCRIPT, "        self._check_names(tensors.keys(), expected)\n"
             "        gathered = time.perf_counter()\n        folder = None\n",
             "        gathered = time.perf_counter()\n        folder = None\n",
             "tests/test_server.py::test_a_push_that_fails_changes_nothing"),
    Mutation("temperature is not sent", SCRIPT, '"temperature": self.temperature, "top_p": self.top_p',
             '"top_p": self.top_p', "tests/test_faults.py::test_what_a_step_asks_its_server_for"),
    Mutation("top_k is not sent", SCRIPT, '"top_k": self.top_k, "min_p"', '"min_p"',
             "tests/test_faults.py::test_what_a_step_asks_its_server_for"),
    Mutation("generation_kwargs are not sent", SCRIPT, '"stop_token_ids": list(self.eos_token_ids),\n'
             "            **(args.generation_kwargs or {}),", '"stop_token_ids": list(self.eos_token_ids),',
             "tests/test_faults.py::test_what_a_step_asks_its_server_for"),
    Mutation("unset fields take the model's own", SCRIPT, '"top_k": 0, "min_p": 0.0, ', "",
             "tests/test_server.py::test_unset_sampling_fields_do_not_take_the_models_own"),
    Mutation("a changed prompt is accepted", SCRIPT, "if seen != len(prompt_ids):", "if seen < len(prompt_ids):",
             "tests/test_faults.py::test_a_fault_that_passes_costs_a_retry"),
    Mutation("an aborted sample is accepted", SCRIPT, 'finish_reason not in ("stop", "length")', "not finish_reason",
             "tests/test_faults.py::test_a_fault_that_passes_costs_a_retry[aborted]"),
    Mutation("a NaN for a logprob is accepted", SCRIPT, "or not all(map(is_logprob, logprobs)):", "or not logprobs:",
             "tests/test_faults.py::test_a_fault_that_passes_costs_a_retry[NaN]"),
    Mutation("ids without all logprobs are accepted", SCRIPT, "if not 0 < counts[0] == counts[1] or",
             "if not 0 < counts[0] or", "tests/test_faults.py::test_a_fault_that_passes_costs_a_retry"),
    Mutation("settings of a server that came back are not compared", SCRIPT, "if new_server:\n            self._check",
             "if False:\n            self._check",
             "tests/test_faults.py::test_a_server_that_comes_back_otherwise_ends_the_run"),
    Mutation("a time limit per byte", SCRIPT, "ClientTimeout(total=timeout, sock_connect=10.0)",
             "ClientTimeout(total=None, sock_read=timeout, sock_connect=10.0)",
             "tests/test_client.py::test_an_answer_that_trickles_is_no_answer"),
    Mutation("a wait in silence", SCRIPT, "if time.monotonic() - said >= self.NOTICE_SECONDS:", "if False:",
             "tests/test_client.py::test_a_wait_says_what_it_waits_for"),
    Mutation("a name that nobody knows is waited for", SCRIPT, "if isinstance(error, never) and not self._reached:",
             "if False:", "tests/test_client.py::test_a_name_that_nobody_knows_is_not_waited_for"),
    Mutation("a name server that fails ends a run", SCRIPT, "if isinstance(error, never) and not self._reached:",
             "if isinstance(error, never):", "tests/test_client.py::test_a_name_that_nobody_knows_is_not_waited_for"),
    Mutation("another service's answer is a traceback", SCRIPT, "except (ValueError, LookupError, TypeError):",
             "except ValueError:", "tests/test_client.py::test_another_service_is_told_as_such"),
    Mutation("passwords are logged with the arguments", SCRIPT,
             "                args.vllm_server_base_url = self.client.base_url\n", "                pass\n",
             "tests/test_faults.py::test_what_a_step_asks_its_server_for"),
    Mutation("passwords are not sent", SCRIPT, 'f"Bearer {api_key}" if api_key else credentials',
             'f"Bearer {api_key}" if api_key else None',
             "tests/test_client.py::test_a_password_is_sent_and_not_shown"),
    Mutation("a lock follows links", SCRIPT, "flags | os.O_NOFOLLOW | os.O_NONBLOCK", "flags | os.O_NONBLOCK",
             "tests/test_client.py::test_an_output_lock_is_an_ordinary_file"),
    Mutation("a lock may be a FIFO", SCRIPT, "if not stat.S_ISREG(found.st_mode) or", "if",
             "tests/test_client.py::test_an_output_lock_is_an_ordinary_file"),
    Mutation("any user may read the weights in a place for all", SCRIPT,
             "if not root.stat().st_mode & stat.S_ISVTX:", "if root:",
             "tests/test_faults.py::test_what_others_put_beside_the_weights_is_left_alone"),
    Mutation("folders of dead runs stay", SCRIPT, "                    self._remove_if_dead(folder)",
             "                    pass",
             "tests/test_faults.py::test_what_others_put_beside_the_weights_is_left_alone"),
    Mutation("other users' folders are removed", SCRIPT, "and found.st_uid == os.geteuid():", ":",
             "tests/test_faults.py::test_what_others_put_beside_the_weights_is_left_alone"),
]  # fmt: skip

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

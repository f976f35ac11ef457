"""What goes wrong in a long run: servers that die or answer nonsense, full disks, slow or dead ranks, signals."""

import contextlib
import os
import re
import signal
import statistics
import subprocess
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import wait
from types import SimpleNamespace

import pytest
import requests
import torch
import warm_python
from bench.common import VLLMServer
from fault_proxy import Fault, FaultProxy, first
from killed_worker import killed_and_resumed
from processes import on_two_ranks
from project import ROOT, json_lines, steps_of
from server_run import (
    CONTEXT,
    FLAGS,
    MODEL,
    assert_from_the_weights_of_its_version,
    assert_whole,
    calculator,
    first_number,
    holding,
    logprobs_under,
    make_trainer,
    needs_vllm,
    paused,
    replace_server,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

import mt_grpo_trainer
from mt_grpo.base.errors import RunStopped
from mt_grpo.base.event_loop import run_async, start_in_background
from mt_grpo.generation.in_process import InProcessBackend
from mt_grpo.generation.samples import tagged
from mt_grpo.generation.weight_sync import WeightSync
from mt_grpo.reports.metrics import staleness_metrics
from mt_grpo.rollout import Generation, Rollout, StopReason, Turn
from mt_grpo_trainer import MTGRPOEnvTrainer, MultiTurnToolEnv, VLLMServerClient, main

COMPLETIONS = "/v1/completions"


@pytest.fixture(autouse=True)
def no_leftovers():
    """Whatever a test does to the process, the next one starts without it."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    yield
    assert {s: signal.getsignal(s) for s in handlers} == handlers


@pytest.fixture
def proxy(server):
    """In front of the server, without faults yet."""
    with FaultProxy(server.url) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture
def client(proxy, tokenizer):
    client = VLLMServerClient("127.0.0.1", proxy.port, tokenizer, timeout=20, request_timeout=60)
    yield client
    client.close()


def pushed_versions(proxy) -> list[str]:
    """The versions whose push was completed so far, without the one that only shows that pushes arrive."""
    versions = [r.payload["new_version"] for r in list(proxy.requests) if r.path == "/update_weight_version"]
    return [version for version in versions if not version.startswith("loading-") and not version.endswith("-probe")]


# Answers that are late, wrong or missing


def on_choice(edit):
    """A fault's `change`, by what `edit` does to the answer's only choice."""

    def change(answer):
        edit(answer["choices"][0])
        return answer

    return change


def another_prompt(answer):
    answer["usage"]["prompt_tokens"] += 1
    return answer


def longer(choice):
    choice["token_ids"] *= 60
    choice["logprobs"]["token_logprobs"] *= 60


PASSING = [
    Fault("429", status=429),
    Fault("503", status=503, body=b"<html>come back later</html>"),
    Fault("closed", status=0),
    Fault("cut", cut=True),
]
SILENCE = [Fault("silence", delay=600)]
MALFORMED = Fault("malformed", change=lambda answer: b'{"choices": [{"token_ids": [1, 2')
NAN = Fault("NaN", change=on_choice(lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(0, -9999.0)))
HUGE = {"token_ids": [2**70], "logprobs": {"token_logprobs": [-1.0]}}  # no ids of the vocabulary
NO_SAMPLES = [
    MALFORMED,
    NAN,
    Fault("list", change=lambda answer: [answer]),
    Fault("fewer logprobs", change=on_choice(lambda choice: choice["logprobs"]["token_logprobs"].pop())),
    Fault("without ids", change=on_choice(lambda choice: choice.pop("token_ids"))),
    Fault("empty", change=on_choice(lambda choice: choice.update(token_ids=[], logprobs={"token_logprobs": []}))),
    Fault("huge ids", change=on_choice(lambda choice: choice.update(HUGE))),
    Fault("another prompt", change=another_prompt),
    Fault("longer", change=on_choice(longer)),
    Fault("aborted", change=on_choice(lambda choice: choice.update(finish_reason="abort"))),
    Fault("cut", change=on_choice(lambda choice: choice.update(finish_reason="length"))),  # before max_tokens
]


@needs_vllm
@pytest.mark.parametrize("faults", [PASSING, SILENCE, NO_SAMPLES], ids=["passing", "silence", "no samples"])
def test_a_fault_that_passes_costs_a_retry(proxy, client, faults):
    """Requests that fail once are sent again, are counted, and leave nothing in the records."""
    env = MultiTurnToolEnv([calculator], "Use the calculator, then answer.", max_completion_length=120,
                           max_turn_tokens=48, max_model_len=CONTEXT)  # fmt: skip
    # A busy machine answers late: only the silence is longer than what a request may take, and nothing is given up.
    client.timeout, client.request_timeout = 600.0, 15.0 if faults == SILENCE else 600.0
    for fault in faults:
        client.retries = 0
        proxy.faults = first(3, fault, COMPLETIONS)
        prompts = [f"What is {a} * 37?" for a in range(20, 28)]
        rollouts = env.generate(prompts, client, {"temperature": 0.0})["rollouts"]
        assert_whole(rollouts)
        assert sum(r.stop_reason == StopReason.ANSWERED for r in rollouts) >= 4
        assert proxy.counts[fault.name] == 3, fault.name
        assert client.retries == 3 or faults == SILENCE and client.retries > 3, fault.name


# A server that dies


@needs_vllm
def test_a_killed_server_costs_only_the_conversations_it_had(server, tmp_path):
    """Killed amid rollouts, with another on its port: finished conversations stay, the others start over.

    The weights were changed by two steps before, so a token of the new server's first weights would show.
    """
    new, proofs = [], []

    async def killed_after_three_proofs():
        """The server dies when the first group has ended and what it says since then has been read."""
        held = await ask()
        if len(trainer.begun) == 3 and all(rollout.stop_reason for rollout in trainer.begun[2][:8]):
            proofs.append(held)
        if len(proofs) == 3:
            new.append(replace_server(server))
        return held

    env = holding(lambda trainer, rollout, number: number == 2 and rollout.index >= 8 and not new)
    trainer = make_trainer(server.port, tmp_path, env_class=env, max_steps=3)
    (client,) = trainer.client.servers
    ask, client.held_version = client.held_version, killed_after_three_proofs
    trainer.train()
    new[0].join()
    assert trainer.state.global_step == 3 and len(trainer.batches) == 3
    assert trainer.rows("rollout/restarted")[:2] == [0, 0] and 0 < trainer.rows("rollout/restarted")[2] < 16
    assert trainer.rows("rollout/retries")[2] > 0
    again = [which for step, which in trainer.set_off if step == 2]
    assert len(again) == 2 and again[0] == list(range(16)) and len(again[1]) == trainer.rows("rollout/restarted")[2]
    assert max(trainer.rows("sampling/sampling_logp_difference/mean")) < 1e-4
    assert [r.index for r in trainer.batches[2]] == list(range(16))
    assert_whole(trainer.batches[2])
    assert_from_the_weights_of_its_version(trainer)
    assert client.weight_version() == tagged(trainer.weight_sync.pushed, client.lineage)
    assert client.lineage > 0 and not paused(server)


@needs_vllm
def test_a_push_that_meets_a_fault_is_made_again(server, proxy, tmp_path):
    """An error in one, and death between pause and reload: all are repeated."""
    new = []

    def rule(request):
        if request.path != "/collective_rpc":
            return None
        if trainer.state.global_step == 1 and not proxy.counts["500"]:
            return Fault("500", status=500)
        if trainer.state.global_step == 2 and not new:
            new.append(replace_server(server))
            return Fault("killed")
        return None

    trainer = make_trainer(proxy.port, tmp_path)
    proxy.faults = rule
    trainer.train()
    new[0].join()
    assert trainer.state.global_step == 3
    assert proxy.counts["500"] == proxy.counts["killed"] == 1
    assert max(trainer.rows("sampling/sampling_logp_difference/mean")) < 1e-4
    assert trainer.rows("rollout/restarted") == [0, 0, 0]
    (client,) = trainer.client.servers
    assert client.weight_version() == tagged(trainer.weight_sync.pushed, client.lineage)
    assert client.lineage > 0 and not paused(server)
    assert_from_the_weights_of_its_version(trainer)
    trainer.client.close()
    assert not list(tmp_path.glob("*mt-grpo*"))


@needs_vllm
def test_what_a_step_asks_its_server_for(proxy, tmp_path, monkeypatch):
    """A probe and a push, nothing sampled meanwhile; every sampling field as configured; the policy as it was."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    sampling = dict(temperature=0.7, top_p=0.9, top_k=5, min_p=0.05, repetition_penalty=1.1)
    trainer = make_trainer(None, tmp_path, max_steps=1, learning_rate=0.0, **sampling,
                           generation_kwargs={"frequency_penalty": 0.5},
                           vllm_server_base_url=f"http://ann:hunter2@127.0.0.1:{proxy.port}")  # fmt: skip
    trainer.train()

    def push(version):
        return ["/pause?mode=keep", f"loading-{version}", "/collective_rpc?", "/reset_prefix_cache?", version,
                "/resume?"]  # fmt: skip

    version = trainer.weight_sync.pushed
    calls = [(r.payload or {}).get("new_version") or f"{r.path}?{r.query}" for r in proxy.requests
             if r.method == "POST" and r.path not in ("/tokenize", COMPLETIONS)]  # fmt: skip
    assert calls == [*push(f"{version}-probe"), *push(version)]
    sampled = [r for r in proxy.requests if r.path == COMPLETIONS and "prompt_logprobs" not in r.payload]
    assert [r.path for r in proxy.requests[: proxy.requests.index(sampled[0])]].count("/resume") == 2
    assert len(sampled) >= 16
    expected = {
        **sampling, "frequency_penalty": 0.5, "stop": ["</tool>", "</answer>"], "include_stop_str_in_output": True,
        "n": 1, "logprobs": 0, "return_token_ids": True, "skip_special_tokens": False,
    }  # fmt: skip
    for request in sampled:
        assert {key: request.payload.get(key) for key in expected} == expected
        assert 0 < request.payload["max_tokens"] <= 48
        assert trainer.processing_class.eos_token_id in request.payload["stop_token_ids"]
        assert request.payload["cache_salt"] == version
    scored = [r.payload for r in proxy.requests if "prompt_logprobs" in (r.payload or {})]
    assert [(p["temperature"], p["prompt_logprobs"]) for p in scored] == [(1.0, 0)] * 2  # of the probe and the push
    before = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())
    # The password goes to the server, and nowhere else.
    assert {r.headers.get("Authorization") for r in proxy.requests} == {"Basic YW5uOmh1bnRlcjI="}
    assert "hunter2" not in trainer.args.to_json_string() + str(trainer.args)


@needs_vllm
@pytest.mark.parametrize("kept", ["", "without a salt", "salted"])
def test_keys_of_old_weights_do_not_outlive_a_push(proxy, client, tmp_path, kept):
    """A prompt of 400 tokens fills blocks of the prefix cache, which 128 tokens share.

    With `kept` the server says that it dropped its cache, and did not. Then the salt alone keeps old keys away.
    """
    client.transfer.sync_dir = str(tmp_path)
    prompt = [(7 * i * i) % 300 + 20 + len(kept) for i in range(400)]
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    client.update_weights(iter(model.state_dict().items()), "v-old")
    client.pushed = "v-old" if kept == "salted" else None
    run_async(client.generate(prompt, 16, {"stop": []}))
    state = {name: tensor * 1.1 for name, tensor in model.state_dict().items()}
    if kept:
        done = Fault("done, it says", status=200, body=b'{"success": true}')
        proxy.faults = lambda request: done if request.path in ("/pause", "/reset_prefix_cache", "/resume") else None
    client.update_weights(iter(state.items()), "v-other")
    client.pushed = "v-other" if kept == "salted" else None
    generation = run_async(client.generate(prompt, 16, {"stop": []}))
    model.load_state_dict(state)
    ids = torch.tensor([prompt + generation.token_ids])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
    right = generation.logprobs == pytest.approx(logprobs.tolist(), abs=1e-3)
    assert right == (kept != "without a salt")  # which shows that the fault is one


STOPPING = """
import os
import time


def calculator(expression: str) -> str:
    '''Evaluate a product.

    Args:
        expression: Such as `6 * 7`.
    '''
    if os.environ.get("RANK") == "1":
        time.sleep(float(os.environ.get("SLOW_RANK", 0)))
    left, _, right = expression.partition("*")
    return str(int(left) * int(right))


def length_reward(completion_ids, **kwargs):
    return [(sum(ids) % 17) / 17 for ids in completion_ids]


TOOL_FUNCTIONS = [calculator]
OUTCOME_REWARD_FUNCS = [length_reward]
"""


def recipe_arguments(recipe, folder, *arguments):
    """Of the trainer's command line: a recipe made small, its output in `folder`."""
    (folder / "stopping.py").write_text(STOPPING)
    return ["--config", str(ROOT / "hf_recipes/tiny" / recipe), "--model_name_or_path", str(MODEL), "--output_dir",
            str(folder / "out"), "--tools_script", str(folder / "stopping.py"), "--reward_fn",
            str(folder / "stopping.py"), "--max_steps", "4", "--dataset_size", "64", "--per_device_train_batch_size",
            "8", "--max_completion_length", "96", "--max_turn_tokens", "40", "--disable_tqdm", "true",
            *map(str, arguments)]  # fmt: skip


@needs_vllm
@pytest.mark.parametrize("where, timeout", [("push", 3), ("push", 3600), ("rollouts", 3)])
def test_a_server_that_is_away_ends_the_run_saved(proxy, tmp_path, where, timeout):
    """It is waited for as long as `vllm_server_timeout`, or until a signal. With it the run goes on to its end."""

    def rule(request):
        last = (2, "/pause") if where == "push" else (3, COMPLETIONS)
        if proxy.reachable and (len(pushed_versions(proxy)), request.path) == last:
            proxy.reachable = False
            if timeout > 3:
                threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return None

    def run(*more):
        main(recipe_arguments("calculator-vllm.yaml", tmp_path, "--vllm_server_port", proxy.port,
                              "--vllm_server_timeout", timeout, "--weight_sync_dir", tmp_path, *more))  # fmt: skip

    proxy.faults = rule
    with pytest.raises(SystemExit) as stopped:
        run()
    saved, said = tmp_path / "out/checkpoint-2", str(stopped.value.code)
    assert saved.is_dir()
    if timeout > 3:
        assert stopped.value.code == 128 + signal.SIGTERM
        return
    assert "tep 2: " in said and f"127.0.0.1:{proxy.port}" in said, said
    assert f"Continue with --resume_from_checkpoint {saved}" in said
    if where == "rollouts":
        proxy.forget()
        run("--resume_from_checkpoint", saved)
        rows = steps_of(tmp_path / "out")
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
        assert max(row["sampling/sampling_logp_difference/mean"] for row in rows) < 1e-4


# Rollouts that overlap with the optimisation


def turn_of(*versions):
    """A turn of some requests, each with the weights that it was asked and answered with."""
    return Turn([1], [0.0], "", "stop", generations=[Generation([1], [0.0], "stop", None, v) for v in versions])


@pytest.mark.contract("max_staleness")
def test_a_turn_counts_from_its_oldest_weights(monkeypatch):
    """Four turns at version 7, two of them of two versions, and one of which nothing is known; then what ranks add.

    Of ten batches one has a straggler on the other rank. A log is of all turns since the last one.
    """
    turns = [turn_of((7, 7)), turn_of((5, 5)), turn_of((4, 5), (6, 6)), turn_of(None)]
    metrics, stale, others = defaultdict(list), Counter(), []
    monkeypatch.setattr("mt_grpo.reports.metrics.gather_object", lambda own: [*own, Counter(others)])

    def logged(rollouts, version):
        staleness_metrics(rollouts, version, metrics, stale)
        return {name.removeprefix("rollout/staleness"): statistics.mean(of) for name, of in metrics.items()}

    first, unknown = Rollout([], [], turns=turns[:3]), Rollout([], [], turns=turns[3:], policy_version=6)
    assert logged([first, unknown], 7) == {"": 1.5, "_p50": 1, "_p99": 3, "_max": 3}
    metrics.clear()  # as TRL does after a log
    for batch in range(10):
        others[:] = [0, 30] if batch == 3 else [0]
        rows = [Rollout([], [], turns=[turn_of((40 - age, 40))]) for age in [0] * 4 + [2] * 6]
        found = logged(rows, 40)
    assert found == {"": 150 / 111, "_p50": 2, "_p99": 2, "_max": 30}  # 50 turns of 0, 60 of 2 and one of 30
    metrics.clear()
    others.clear()
    assert logged([], 40) == {"": 0, "_p50": 0, "_p99": 0, "_max": 0}  # not one turn on any rank


@pytest.mark.contract_server("max_staleness", "late_groups")
@needs_vllm
@pytest.mark.parametrize("limit", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_bound_on_staleness_is_hard(server, tmp_path, limit):
    """Batches are in flight while weights are pushed: none is thrown away, asked twice, or older than allowed."""
    steps = 4 + limit

    def is_held(trainer, rollout, number):
        """Until the push of the step before its own, or where that began its batch (a bound of 1), until its own."""
        last_pushed = min(number, steps - limit)  # the last steps push nothing
        is_early = trainer.held_version < last_pushed or trainer.state.global_step < number - limit + 1
        return number > 0 and first_number(rollout) % 2 == 0 and is_early

    trainer = make_trainer(server.port, tmp_path, env_class=holding(is_held), max_steps=steps, max_staleness=limit)
    trainer.train()
    # Batch b is asked for with the weights of step max(0, b - limit), and trained in step b.
    assert [{r.policy_version for r in batch} for batch in trainer.batches] == [
        {max(1, 1 + step - limit)} for step in range(steps)
    ]
    assert trainer.rows("rollout/staleness_max") == [min(step, limit) for step in range(steps)]
    assert trainer.rows("rollout/restarted") == trainer.rows("rollout/retries") == [0] * steps
    asked = [r.prompt_messages[-1]["content"] for batch in trainer.batches for r in batch]
    assert set(Counter(asked).values()) == {8} and len(trainer.begun) == steps and not trainer.in_flight.groups
    kinds = assert_from_the_weights_of_its_version(trainer)
    assert kinds["first"] > 0 and (kinds["later"] > 0 or limit == 1)


@needs_vllm
def test_a_push_in_the_middle_of_requests(server, tmp_path, monkeypatch):
    """The answers come back whole. Their last parts are of the new weights, without keys and values of the old."""
    trainer = make_trainer(server.port, tmp_path)
    trainer._sync_weights()
    (client,) = trainer.client.servers
    request, futures, differences, count = client.request, [], [], 450
    prompt = trainer.processing_class("What is 12 * 34? " * 3)["input_ids"]

    def sampled_tokens():
        metrics = requests.get(f"{server.url}/metrics", timeout=60).text
        return float(re.search(r"^vllm:generation_tokens_total\{.*\} (\S+)", metrics, re.MULTILINE)[1])

    def request_amid(method, path, **kwargs):
        for _ in range(20 if path == "/pause" else 0):
            wait(futures)  # on a busy machine all of them may have ended before the server could be paused
            before, params = sampled_tokens(), {"stop": [], "ignore_eos": True}
            futures[:] = [start_in_background(client.generate(prompt, count, params)) for _ in range(8)]
            while sampled_tokens() < before + 8 * 30:
                time.sleep(0.01)
            if not any(future.done() for future in futures):
                break
        return request(method, path, **kwargs)

    monkeypatch.setattr(client, "request", request_amid)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.1)
    trainer._weight_counter.version += 1
    trainer._sync_weights()
    trainer.batches, model = [[]], AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    for generation in [future.result(120) for future in futures]:
        lengths = len(generation.token_ids), len(generation.logprobs)
        assert (*lengths, generation.finish_reason, generation.policy_versions) == (count, count, "length", (0, 1))
        turn = Turn(generation.token_ids, generation.logprobs, "", "length", generations=[generation])
        rollout, sampled = Rollout([], prompt, turns=[turn]), torch.tensor(generation.logprobs)
        trainer.batches[0].append(rollout)
        old, new = (logprobs_under(trainer.weights[version], rollout) for version in (0, 1))
        first, *_ = [*((sampled - old).abs() > 1e-3).nonzero()[:, 0].tolist(), count]  # token of the new weights
        assert sampled[first:].tolist() == pytest.approx(new[first:].tolist(), abs=1e-3)
        if not 10 <= first <= count - 10:
            continue
        # With the old keys and values of what was before the push, the new weights would give other logprobs.
        ids, at = torch.tensor([prompt + generation.token_ids]), len(prompt) + first - 1
        with torch.no_grad():
            model.load_state_dict(trainer.weights[0])
            keys = model(ids[:, :at], use_cache=True).past_key_values
            model.load_state_dict(trainer.weights[1])
            logits = model(ids[:, at:-1], past_key_values=keys).logits[0]
        mixed = logits.log_softmax(-1).gather(1, ids[0, at + 1 :, None])[:, 0]
        differences.append((sampled[first:] - mixed).abs().max().item())
    assert differences and min(differences) > 0.1
    assert assert_from_the_weights_of_its_version(trainer)["two"] >= len(differences)
    trainer.client.close()


@needs_vllm
def test_a_restart_just_before_a_push_is_noticed(proxy, tmp_path):
    """It held the right weights when it was asked, and others when it was paused: nobody knows what it sampled."""
    restarts = []

    def rule(request):
        if request.path == "/pause" and len(pushed_versions(proxy)) == 2 and not restarts:
            restarts.append(requests.post(f"{proxy.target}/update_weight_version", json={"new_version": "default"}))
        return None

    proxy.faults = rule
    env = holding(lambda trainer, rollout, number: number == 3 and not restarts)  # the batch that is in flight
    trainer = make_trainer(proxy.port, tmp_path, env_class=env, max_steps=6, max_staleness=2)
    trainer.train()
    (client,) = trainer.client.servers
    assert len(restarts) == 1 and client.lineage == 1
    assert client.weight_version() == f"{trainer.weight_sync.pushed}+1"
    restarted = trainer.rows("rollout/restarted")
    assert restarted[3] > 0 and restarted[:3] == [0, 0, 0]
    assert_from_the_weights_of_its_version(trainer)


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("place", ["rollouts", "save"])
@pytest.mark.parametrize("ahead", [(), ("--max_staleness", 2, "--late_groups", "admit")], ids=["server", "admit"])
def test_a_kill_costs_no_prompt_of_any_epoch(server, tmp_path, ahead, place):
    """`kill -9` in the second of two epochs: the resumed run trains what the checkpoint's epoch has left."""
    arguments = recipe_arguments(
        "calculator-vllm.yaml", tmp_path, "--vllm_server_port", server.port, "--weight_sync_dir", tmp_path,
        "--max_steps", 8, "--dataset_size", 8, "--num_generations", 4, "--save_strategy", "steps", "--save_steps", 2,
        "--shuffle_dataset", "true", *ahead,
    )  # fmt: skip
    log, prompts = killed_and_resumed(tmp_path, place, arguments)
    assert [row["step"] for row in log] == list(range(1, 9)) and all(abs(row["loss"]) < 100 for row in log)
    for epoch in (0, 4):
        trained = [prompt for step in range(epoch, epoch + 4) for prompt in prompts[step]]
        assert len(trained) == len(set(trained)) == 8
    assert ahead or max(row["sampling/sampling_logp_difference/mean"] for row in log) < 1e-4


# Stopping


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The log of a run in process that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    main(recipe_arguments("calculator.yaml", folder))
    return steps_of(folder / "out")


@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_ends_the_run_saved(whole, tmp_path, signum):
    """Within seconds, with the shell's exit code for it; the resumed run is the uninterrupted one."""
    arguments = recipe_arguments("calculator.yaml", tmp_path)
    process = subprocess.Popen([warm_python.executable(), mt_grpo_trainer.__file__, *arguments], cwd=ROOT,
                               env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)  # fmt: skip
    try:
        log, deadline = tmp_path / "out/rollouts.rank0.jsonl", time.monotonic() + 120
        while not log.is_file() or '"step": 1' not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0][-3000:]
            time.sleep(0.02)
        process.send_signal(signum)
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signum, said[-3000:]
    (saved,) = (tmp_path / "out").glob("checkpoint-*")
    assert f"stopped by {signum.name}" in said and f"--resume_from_checkpoint {saved}" in said
    assert "Traceback" not in said and "never awaited" not in said
    main([*arguments, "--resume_from_checkpoint", "last"])
    resumed = steps_of(tmp_path / "out")
    assert [row["step"] for row in resumed] == [row["step"] for row in whole] == [1, 2, 3, 4]
    for key in ("reward", "loss"):
        assert [row[key] for row in resumed] == pytest.approx([row[key] for row in whole], abs=1e-5)


@pytest.mark.parametrize("collective", [True, False])
def test_no_interruption_where_other_ranks_take_part(collective):
    """A rank that left a collective generation would leave the others in it; it stops at the next meeting."""
    rank, seen = SimpleNamespace(_stop_signal=signal.SIGTERM, state=SimpleNamespace(global_step=0)), []
    rank.llm = InProcessBackend(None, None, any_rank=bool if collective else None)
    with contextlib.nullcontext() if collective else pytest.raises(RunStopped):
        MTGRPOEnvTrainer._on_all_ranks(rank, lambda: seen.append(rank._interruptible), "Rollouts")
    assert seen == [False] * collective and not rank._interruptible


def test_a_trainer_with_nan_is_far_from_its_server():
    """`max` of a list with NaN depends on the order."""
    servers = SimpleNamespace(scores=lambda ids: {0: [[-1.0, -2.0]], 2: [[-1.5, -2.5], [-1.0, -2.5]]})
    trainer = SimpleNamespace(servers=servers, _probe_ids=[1, 2, 3])
    trainer._largest_of_ranks = lambda distances: WeightSync._largest_of_ranks(trainer, distances)
    assert WeightSync._distances(trainer, torch.tensor([-1.5, -2.5])) == {0: 0.5, 2: 0.25}
    assert WeightSync._distances(trainer, torch.tensor([-1.5, float("nan")])) == {0: float("inf"), 2: float("inf")}


# Two ranks

TWO_RANKS = """
import json, os
import mt_grpo_trainer as m

STEPS, start, calculate = 0, m.MTGRPOEnvTrainer._start_rollouts, m.MTGRPOEnvTrainer._calculate_rewards


def start_rollouts(self, prompts, which):
    if os.environ["RANK"] == "1" and self.state.global_step == 2 and "DEAD_PORT" in os.environ:
        self.client.servers[0].base_url = "http://127.0.0.1:9"
    return start(self, prompts, which)


def note(self, inputs, *args):
    global STEPS
    STEPS = self.state.global_step + 1
    rows = [[row["question"], rollout.prompt_messages[-1]["content"], rollout.index, rollout.policy_version]
            for row, rollout in zip(inputs, self.batch.rollouts)]
    with open(f"{os.environ['NOTES']}{os.environ['RANK']}", "a") as file:
        file.write(json.dumps(rows) + "\\n")
    return calculate(self, inputs, *args)


m.MTGRPOEnvTrainer._start_rollouts, m.MTGRPOEnvTrainer._calculate_rewards = start_rollouts, note
m.main()
"""  # notes the rows, indices and versions of each batch


def worker(folder):
    (folder / "worker.py").write_text(TWO_RANKS)
    return folder / "worker.py"


@needs_vllm
def test_what_happens_to_one_rank_ends_both(server, tmp_path):
    """A slow rank is waited for; one that cannot go on stops both, saved."""
    arguments = recipe_arguments("calculator-vllm.yaml", tmp_path, "--vllm_server_port", server.port,
                                 "--vllm_server_timeout", "3", "--weight_sync_dir", tmp_path)  # fmt: skip
    code, said = on_two_ranks(worker(tmp_path), *arguments, NOTES=tmp_path / "notes", DEAD_PORT="1", SLOW_RANK="1.0")
    saved = tmp_path / "out/checkpoint-2"
    assert code != 0 and saved.is_dir(), said[-3000:]
    message = "error: Rollouts failed at step 2: rank 1: ServerLost: POST http://127.0.0.1:9/v1/completions"
    assert said.count(message) == 2, said[-3000:]
    assert said.count(f"Continue with --resume_from_checkpoint {saved}") == 2
    rows = steps_of(saved)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in rows)
    assert rows[0]["rollout/seconds"] > 0


SLOW_FOR_SOME = """
import sys, threading, time

FIRST, LOCK = [True], threading.Lock()


def calculator(expression: str) -> str:
    \"\"\"Evaluate an arithmetic expression. The first call of a rank ends after the rewards of five batches.

    Args:
        expression: Such as `6 * 7`.
    \"\"\"
    with LOCK:
        is_slow, FIRST[0] = FIRST[0], False
    while is_slow and sys.modules["__main__"].STEPS < 5:
        time.sleep(0.05)
    return "1"


TOOL_FUNCTIONS = [calculator]
"""


@needs_vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("late_groups, num_steps, size", [("wait", 6, 15), ("admit", 8, 24)])
def test_two_ranks_take_the_same_groups(server, tmp_path, late_groups, num_steps, size):
    """Three groups of four on two ranks of six: the second one is on both. Each prompt of an epoch is trained once.

    With `wait` no batch is older than two batches, though the second rank's tools are slow.
    """
    (tmp_path / "tool.py").write_text(SLOW_FOR_SOME)
    slow = ("--tools_script", tmp_path / "tool.py", "--tool_timeout", "500") if late_groups == "admit" else ()
    arguments = recipe_arguments(
        "calculator-vllm.yaml", tmp_path, "--vllm_server_port", server.port, "--weight_sync_dir", tmp_path,
        "--max_steps", num_steps, "--dataset_size", size, "--per_device_train_batch_size", "6", "--num_generations",
        "4", "--max_staleness", "2", "--late_groups", late_groups, "--credit_assignment", "gigpo", "--save_strategy",
        "no", *slow,
    )  # fmt: skip
    code, said = on_two_ranks(worker(tmp_path), *arguments, NOTES=str(tmp_path / "notes"), SLOW_RANK="0.7")
    assert code == 0, said[-3000:]
    ranks = [json_lines(tmp_path / f"notes{rank}") for rank in (0, 1)]
    asked, versions = [], []
    for one, other in zip(*ranks, strict=True):
        rows = one + other
        assert len(one) == len(other) == 6 and [index for _, _, index, _ in rows] == list(range(12))
        assert all(question == prompt for question, prompt, _, _ in rows)
        groups = [rows[i : i + 4] for i in (0, 4, 8)]
        assert all(len({(question, version) for question, _, _, version in group}) == 1 for group in groups)
        asked += [group[0][0] for group in groups]
        versions.append({version for *_, version in rows})
    assert len(ranks[0]) == num_steps and len(set(asked[:size])) == size
    if late_groups == "wait":  # an epoch has five batches; its first ones are asked for when it begins
        assert versions == [{1}, {1}, {1}, {2}, {3}, {6}]
    else:  # the bound of `wait` would not have let them
        assert any(step + 1 - min(of_step) > 2 for step, of_step in enumerate(versions))


# A server of several workers


@needs_vllm
@pytest.mark.slow
def test_each_worker_of_a_server_gets_its_part_of_a_push(tmp_path, monkeypatch):
    """Tensor parallelism, as `VLLM_TP=2` starts it. On a CPU the workers are two processes."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with VLLMServer(MODEL, *FLAGS, "--tensor-parallel-size", "2", timeout=300.0) as server:
        trainer = make_trainer(server.port, tmp_path)
        trainer.train()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    assert len(rows) == 3 and all(row["sampling/sampling_logp_difference/mean"] < 1e-5 for row in rows), rows
    assert all(row["sync/logprob_difference"] < 1e-4 for row in rows)

"""Rollouts that go on from a state of another one: what they read, sample, train, and what a run does with them."""

import asyncio
import copy
import json
import random
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from scripted import CHATML_TOKENIZER, Scripted, call, ids, result
from transformers import AutoModelForCausalLM

from mt_grpo.base.errors import NoServerLeft
from mt_grpo.base.event_loop import gather_all, run_async
from mt_grpo.base.ranks import RunError
from mt_grpo.conversation.trees import BRANCH_POINTS, BranchPoints, plant
from mt_grpo.generation.in_process import InProcessBackend
from mt_grpo.recipe.checks import check_env
from mt_grpo.recipe.refusals import check_trees
from mt_grpo.rollout import Reply, Rollout, StopReason
from mt_grpo.run.in_flight import InFlight
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv, build_trainer, parse_arguments

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "hf_recipes/tiny/calculator-model")


def add(amount: int) -> str:
    """Add to nothing.

    Args:
        amount: How much.
    """
    return str(amount)


class Counter:
    """An environment with a state, which can be copied."""

    def reset(self, **row) -> str:
        self.value, self.closed = 0, False
        return " From 0."

    def add(self, amount: int) -> str:
        """Add to the counter.

        Args:
            amount: How much.
        """
        self.value += amount
        return str(self.value)

    def fork(self):
        return copy.copy(self)

    def get_reward(self) -> float:
        return float(self.value)

    def close(self):
        self.closed = True


def converse(scripts, size=3, states=(1,), num_branches=2, tools=(add,), environment=None, backend=None, **settings):
    """Conversations of one tree or several; `scripts[i]` are the turns that rollout i samples itself."""
    tools = [] if environment else list(tools)
    env = MultiTurnToolEnv(
        tools, None, settings.pop("max_steps", 3), tokenizer=CHATML_TOKENIZER, environment=environment, **settings
    )
    backend = backend or Scripted(scripts)
    rollouts = env.start([[{"role": "user", "content": "Count."}]] * len(scripts), backend, [{}] * len(scripts))
    plant(rollouts, size, num_branches, lambda trunk: states)
    run_async(gather_all([env.converse_whole(rollout, backend) for rollout in rollouts]))
    return env, rollouts, backend


ONE, TWO, FIVE = (call("add", amount=n) for n in (1, 2, 5))


def test_a_branch_goes_on_from_a_state_of_its_trunk():
    scripts = [[ONE, TWO, "<answer>a</answer>"], ["<answer>b</answer>"], [FIVE, "<answer>c</answer>"]]
    _, (trunk, left, right), backend = converse(scripts)
    prompt = ids("<|im_start|>user\nCount.<|im_end|>\n<|im_start|>assistant\n")
    state = prompt + ids(ONE) + ids(result("1"))
    assert [request.prompt for request in backend.of(1)] == [state]
    assert [request.prompt for request in backend.of(2)] == [state, state + ids(FIVE) + ids(result("5"))]
    assert [rollout.num_copied for rollout in (trunk, left, right)] == [0, 1, 1]
    assert [[turn.text for turn in rollout.turns] for rollout in (trunk, left, right)] == [
        [ONE, TWO, "<answer>a</answer>"], [ONE, "<answer>b</answer>"], [ONE, FIVE, "<answer>c</answer>"],
    ]  # fmt: skip
    assert right.completion_ids == ids(ONE) + ids(result("1")) + ids(FIVE) + ids(result("5")) + ids(scripts[2][1])
    num_read = len(ids(ONE) + ids(result("1")))
    assert left.loss_mask == [0] * num_read + [1] * len(ids("<answer>b</answer>"))
    assert left.turn_ids == [-1] * num_read + [1] * len(ids("<answer>b</answer>"))
    assert left.logprobs[: len(ids(ONE))] == trunk.logprobs[: len(ids(ONE))]
    assert trunk.loss_mask[: len(ids(ONE))] == [1] * len(ids(ONE))  # a copy's mask is its own
    left.turns[0].messages[0]["content"] = left.turns[0].token_ids[0] = "changed"
    assert "changed" not in (trunk.turns[0].messages[0]["content"], trunk.turns[0].token_ids[0])
    assert "changed" not in (right.turns[0].messages[0]["content"], right.turns[0].token_ids[0])


def test_a_branch_goes_on_with_the_text_that_was_put_behind_its_trunk():
    """It opens an answer, which the branch closes."""

    class Leads(Counter):
        def respond(self, rollout, turn):
            return Reply(continuation="<answer>") if len(rollout.turns) == 1 else None

    scripts = [[ONE, "1</answer>"], ["2</answer>"], ["3</answer>"]]
    _, rollouts, _ = converse(scripts, environment=Leads)
    assert [rollout.num_copied for rollout in rollouts] == [0, 1, 1]
    assert [rollout.turns[-1].answer for rollout in rollouts] == ["1", "2", "3"]


def test_a_branch_whose_trunk_ends_before_begins_anew():
    scripts = [["<answer>a</answer>"], [ONE, "<answer>b</answer>"], ["<answer>c</answer>"]]
    _, rollouts, backend = converse(scripts)
    assert [rollout.num_copied for rollout in rollouts] == [0, 0, 0]
    assert [[turn.text for turn in rollout.turns] for rollout in rollouts] == scripts
    assert all(turn.trained for rollout in rollouts for turn in rollout.turns)
    assert backend.of(1)[0].prompt == backend.of(0)[0].prompt


def test_branches_of_several_states_and_trees():
    """The first trunk passes both states, the second one of them."""
    scripts = [
        [ONE, TWO, "<answer>a</answer>"], ["<answer>b</answer>"], ["<answer>c</answer>"],
        [FIVE, "<answer>d</answer>"], [TWO, "<answer>e</answer>"], [ONE, ONE, "<answer>f</answer>"],
    ]  # fmt: skip
    _, rollouts, _ = converse(scripts, states=(1, 2), num_branches=1)
    assert [rollout.num_copied for rollout in rollouts] == [0, 1, 2, 0, 1, 0]
    assert [len(rollout.turns) for rollout in rollouts] == [3, 2, 3, 2, 3, 3]
    assert [turn.text for turn in rollouts[2].turns] == [ONE, TWO, "<answer>c</answer>"]


def test_the_environment_is_forked_when_the_trunk_passes():
    """Each goes on with a counter of its own, which is closed as any."""
    scripts = [[ONE, TWO, "<answer>a</answer>"], [FIVE, "<answer>b</answer>"], ["<answer>c</answer>"]]
    env, rollouts, _ = converse(scripts, environment=Counter)
    assert [[turn.observation for turn in rollout.turns] for rollout in rollouts] == [
        ["1", "3", None], ["1", "6", None], ["1", None],
    ]  # fmt: skip
    assert [rollout.reward for rollout in rollouts] == [3.0, 6.0, 1.0]
    assert len({id(rollout.environment) for rollout in rollouts}) == 3
    assert [message["content"] for message in rollouts[1].prompt_messages] == ["Count. From 0."]
    assert (
        rollouts[1].first_messages == rollouts[0].first_messages and rollouts[1].prompt_ids == rollouts[0].prompt_ids
    )
    assert all(rollout.tools["add"].__self__ is rollout.environment for rollout in rollouts)
    env.close(rollouts)
    assert all(rollout.environment.closed for rollout in rollouts)


class Itself(Counter):
    def fork(self):
        return self


class Breaks(Counter):
    def fork(self):
        raise OSError("no room")


class Listed:
    """Its tools are a list, whose methods stay the trunk's in a copy."""

    def reset(self, **row) -> str:
        self.value, self.tools = 0, [self._add]
        return ""

    def _add(self, amount: int) -> str:
        """Add to the counter.

        Args:
            amount: How much.
        """
        self.value += amount
        return str(self.value)

    _add.__name__ = "add"

    def get_reward(self) -> float:
        return float(self.value)

    def fork(self):
        return copy.copy(self)


class Holds(Counter):
    def respond(self, rollout, turn):
        return Reply(info={"lock": threading.Lock()})  # cannot be copied


@pytest.mark.parametrize(
    "environment, says",
    [
        (Itself, "Itself.fork returned itself, expected another Itself."),
        (Breaks, "Breaks.fork raised OSError: no room"),
        (Listed, "After fork the tool 'add' is still of the one that was copied."),
        (Holds, "The turns before a branch cannot be copied: "),
    ],
)
def test_an_environment_that_is_not_copied_ends_the_branch_alone(environment, says):
    scripts = [[ONE, TWO, "<answer>a</answer>"], [], []]
    _, rollouts, _ = converse(scripts, environment=environment)
    assert [rollout.stop_reason for rollout in rollouts] == [StopReason.ANSWERED] + [StopReason.ENVIRONMENT_ERROR] * 2
    assert says in str(rollouts[1].error) and rollouts[0].reward == 3.0 and rollouts[1].failed


class Kept(MultiTurnToolEnv):
    """A class whose conversations have a state of their own, on their rollouts."""

    can_fork = True

    def start(self, prompts, llm=None, rows=None):
        rollouts = super().start(prompts, llm, rows)
        for rollout in rollouts:
            rollout.notes = []
        return rollouts

    async def run_calls(self, rollout, calls, call_format):
        rollout.notes.append(len(calls))
        return await super().run_calls(rollout, calls, call_format)


def test_what_a_subclass_keeps_on_a_rollout_is_copied():
    env, backend = Kept([add], None, 3, tokenizer=CHATML_TOKENIZER), Scripted([[ONE, TWO, "a"], ["b"], [FIVE, "c"]])
    rollouts = env.start(["Count."] * 3, backend)
    plant(rollouts, 3, 2, lambda trunk: [1])
    run_async(gather_all([env.converse_whole(rollout, backend) for rollout in rollouts]))
    assert [rollout.notes for rollout in rollouts] == [[1, 1, 0], [1, 0], [1, 1, 0]]


def test_a_copy_that_takes_too_long_ends_both():
    scripts = [[ONE, TWO, "<answer>a</answer>"], [], ["<answer>c</answer>"]]
    _, rollouts, _ = converse(scripts, environment=Slow, environment_timeout=0.2)
    assert [rollout.stop_reason for rollout in rollouts[:2]] == [StopReason.ENVIRONMENT_ERROR] * 2
    assert "Slow.fork took longer than environment_timeout=0.2 s" in str(rollouts[0].error)


def test_a_copied_environment_serves_no_other_conversation():
    names = ("reset", "add", "fork", "get_reward")  # without close
    Open = type("Open", (), {name: vars(Counter)[name] for name in names})
    env, rollouts, _ = converse([[ONE, "x"], ["y"], ["z"]], environment=Open)
    env.close(rollouts)
    (free,) = env.environments._free.values()
    assert free == [rollouts[0].environment]


class Forgets:
    """Its history is edited behind the first turn, so that a further record begins."""

    def reset(self, **row) -> str:
        return ""

    def respond(self, rollout, turn):
        if len(rollout.turns) == 1:
            return Reply(history=[{"role": "user", "content": "Now."}])

    def fork(self):
        return Forgets()


def test_a_state_behind_an_edited_history():
    scripts = [["One.", "Two."], ["Three."], ["Four."]]
    _, (trunk, left, _), backend = converse(scripts, environment=Forgets)
    edited = ids("<|im_start|>user\nNow.<|im_end|>\n<|im_start|>assistant\n")
    assert [request.prompt for request in backend.of(1)] == [edited] == [backend.of(0)[1].prompt]
    assert [len(rollout.records) for rollout in (trunk, left)] == [2, 2]
    assert [sum(record.loss_mask) for record in left.records] == [0, len("Three.")]


class Hangs(Scripted):
    hangs = False

    async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
        if index == 0 and len(self.of(0)) == 1:
            self.hangs = True
            await asyncio.sleep(3600)
        return await super().generate(prompt_ids, max_tokens, sampling_params, index)


class Fails(Scripted):
    async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
        if index == 0 and len(self.of(0)) == 1:
            raise OSError("gone")
        return await super().generate(prompt_ids, max_tokens, sampling_params, index)


class Slow(Counter):
    async def fork(self):
        await asyncio.sleep(3600)


@pytest.mark.parametrize("environment", [None, Slow])
def test_no_branch_waits_for_a_trunk_that_is_lost(environment):
    """The trunk is cancelled alone, as where its server is lost: before its state, and while it is copied. The branch
    ends as if it had lost its server, too, and not by a conversation from the beginning."""
    tools = [] if environment else [add]
    env = MultiTurnToolEnv(tools, None, tokenizer=CHATML_TOKENIZER, environment=environment)
    backend = Hangs([[ONE, "x"], ["y"], ["z"]])
    rollouts = env.start(["Count."] * 3, backend, [{}] * 3)
    plant(rollouts, 3, 2, lambda trunk: [1] if environment else [2])

    async def run():
        tasks = [asyncio.ensure_future(env.converse_whole(rollout, backend)) for rollout in rollouts]
        while not backend.hangs and not (rollouts[0].turns and environment):
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        tasks[0].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = run_async(asyncio.wait_for(run(), 60))
    assert isinstance(found[0], asyncio.CancelledError) and all(isinstance(each, NoServerLeft) for each in found[1:])
    assert [rollout.turns for rollout in rollouts[1:]] == [[], []] and backend.of(1) == backend.of(2) == []


def test_no_branch_waits_where_its_class_lets_none_go_on():
    with pytest.raises(OSError, match="gone"):
        converse([[]] * 3, backend=Fails([[ONE], ["x"], ["x"]]), states=(2,))

    class Another(MultiTurnToolEnv):
        async def converse(self, rollout, llm, sampling_params=None):
            await super().converse(rollout, llm, sampling_params)
            return Rollout(
                rollout.prompt_messages, rollout.prompt_ids, rollout.index, rollout.turns, rollout.stop_reason
            )

    env, backend = Another([add], None, tokenizer=CHATML_TOKENIZER), Scripted([["x"], ["y"], ["z"]])
    rollouts = env.start(["Count."] * 3, backend)
    plant(rollouts, 3, 2, lambda trunk: [1])
    run_async(gather_all([env.converse_whole(rollout, backend) for rollout in rollouts]))

    class Silent(MultiTurnToolEnv):
        async def converse(self, rollout, llm, sampling_params=None):
            while rollout.stop_reason is None:
                await self.take_turn(rollout, llm, sampling_params)
            return rollout

    env, backend = Silent([add], None, tokenizer=CHATML_TOKENIZER), Scripted([[ONE, "x"], ["y"], ["z"]])
    rollouts = env.start(["Count."] * 3, backend)
    plant(rollouts, 3, 2, lambda trunk: [1])
    run_async(gather_all([env.converse_whole(rollout, backend) for rollout in rollouts]))
    assert [rollout.num_copied for rollout in rollouts] == [0, 0, 0]


def test_a_tree_is_whole():
    env = MultiTurnToolEnv([add], None, tokenizer=CHATML_TOKENIZER)
    rollouts = env.start(["Count."] * 6)
    with pytest.raises(RuntimeError, match="A tree begins with rollout 0 and is not whole"):
        plant([rollouts[0], *rollouts[2:]], 3, 2, lambda trunk: [1])


# --- in process: what is sampled together ----------------------------------------------------------------------------


def test_batches_do_not_depend_on_how_long_a_tool_takes():
    """A branch is in the batch of its trunk's next turn, whichever conversation is the last to ask for tokens."""
    scripts = [
        [ONE, TWO, "<answer>a</answer>"], ["<answer>b</answer>"], [FIVE, "<answer>c</answer>"],
        [FIVE, "<answer>d</answer>"], [ONE, "<answer>e</answer>"], ["<answer>f</answer>"],
    ]  # fmt: skip
    slow = random.Random(0)

    async def add(amount: int) -> str:
        """Add to nothing.

        Args:
            amount: How much.
        """
        await asyncio.sleep(slow.random() / 50)
        return str(amount)

    def batches():
        said, seen = [list(script) for script in scripts], []
        prompts = {}

        def generate(prompt_ids, max_tokens):
            seen.append(sorted(CHATML_TOKENIZER.decode(each)[-30:] for each in prompt_ids))
            return [ids(said[prompts["order"].pop(0)].pop(0)) for _ in prompt_ids], None

        backend = InProcessBackend(generate, lambda token: token == 258)
        inner = backend._run

        def run(batch):
            prompts["order"] = [request[0] for request in batch]
            seen.append(list(prompts["order"]))
            return inner(batch)

        backend._run = run
        env = MultiTurnToolEnv([add], None, 3, tokenizer=CHATML_TOKENIZER)
        rollouts = env.start(["Count."] * 6, backend)
        plant(rollouts, 3, 2, lambda trunk: [1])
        backend.serve([env.converse_whole(rollout, backend) for rollout in rollouts])
        assert [rollout.num_copied for rollout in rollouts] == [0, 1, 1, 0, 1, 1]
        return seen

    first = batches()
    assert first[::2] == [[0, 3], [0, 1, 2, 3, 4, 5], [0, 2, 4]]
    assert all(batches() == first for _ in range(4))


# --- which states ----------------------------------------------------------------------------------------------------


def test_states_are_drawn_by_the_lengths_of_the_last_batch_alone(tmp_path):
    points = BranchPoints()
    assert {points.draw(str(n), 3, 1)[0] for n in range(50)} == {1, 2, 3}
    points.learn(SimpleNamespace(num_turns=[4, 4, 3, 2], num_copied=[0, 2, 0, 0]))
    assert points.turns == {4: 1, 3: 1, 2: 1}  # the second one is a branch
    drawn = [points.draw(f"key {n}", 5, 1)[0] for n in range(4000)]
    chances = [(passed + 0.2) / 7 for passed in (3, 2, 1, 0, 0)]
    assert [drawn.count(at) / 4000 for at in range(1, 6)] == pytest.approx(chances, abs=0.03)
    assert drawn == [points.draw(f"key {n}", 5, 1)[0] for n in range(4000)]
    assert all(sorted(set(points.draw(str(n), 5, 3))) == points.draw(str(n), 5, 3) for n in range(50))
    points.save(tmp_path)
    assert json.loads((tmp_path / BRANCH_POINTS).read_text()) == {"turns": [[2, 1], [3, 1], [4, 1]]}
    assert BranchPoints.saved_in(tmp_path).turns == points.turns
    (tmp_path / BRANCH_POINTS).write_text('{"turns": [[1]]}')
    with pytest.raises(RunError, match="branch_points.json is damaged"):
        BranchPoints.saved_in(tmp_path)


# --- a run -----------------------------------------------------------------------------------------------------------


def calculator(expression: str) -> str:
    """Evaluate a product.

    Args:
        expression: Such as `6 * 7`.
    """
    return "42"


def by_ids(completion_ids, **kwargs):
    return [sum(each) % 7 / 6 for each in completion_ids]


def make(
    out, model=MODEL, environment=None, tools=(calculator,), system="Use the calculator, then answer.", **changes
):
    args = dict(
        output_dir=str(out), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        per_device_train_batch_size=12, num_generations=6, max_completion_length=96, disable_tqdm=True, max_steps=4,
        logging_steps=1, save_strategy="steps", save_steps=2, credit_assignment="tree", scale_rewards="none",
        learning_rate=1e-3, max_env_steps=2, log_rollouts=12, num_branches=2,
    )  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} * 3?"}]} for n in range(11, 27)]
    env = MultiTurnToolEnv([] if environment else list(tools), system, environment=environment)
    return MTGRPOEnvTrainer(
        model, env, [], [by_ids], args=MTGRPOConfig(**{**args, **changes}), train_dataset=Dataset.from_list(rows)
    )


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of four steps, in process, with its log and its checkpoints."""
    trainer = make(tmp_path_factory.mktemp("trees"))
    trainer.train()
    return trainer


def test_a_run_logs_its_trees(whole):
    out = Path(whole.args.output_dir)
    rows = [json.loads(line) for line in (out / "rollouts.rank0.jsonl").read_text().splitlines()]
    assert len(rows) == 48
    branched = [row for row in rows if row["num_copied_turns"]]
    assert branched and all(row["index"] % 3 for row in branched)
    for row in branched:
        trunk = next(each for each in rows if (each["step"], each["index"]) == (row["step"], row["index"] // 3 * 3))
        count = row["num_copied_turns"]
        assert [turn["text"] for turn in row["turns"][:count]] == [turn["text"] for turn in trunk["turns"][:count]]
        assert [turn["num_trained"] for turn in row["turns"][:count]] == [0] * count
        assert row["turn_advantages"][:count] == [0.0] * count
        assert all(turn["num_trained"] == turn["num_tokens"] for turn in row["turns"][count:])
    sampled = sum(
        row["num_prompt_tokens"] + sum(turn["num_tokens"] for turn in row["turns"][row["num_copied_turns"] :])
        for row in rows
    )
    logs = [row for row in whole.state.log_history if "reward" in row]
    assert logs[-1]["num_tokens"] == sampled
    share = [sum(bool(row["num_copied_turns"]) for row in rows if row["step"] == step) / 8 for step in range(4)]
    assert [row["tree/frac_branched"] for row in logs] == share
    assert all(row["tokens/ids_differ"] == row["tokens/mask_differ"] == 0 for row in logs)
    trained = sum(abs(a) > 1e-8 for row in rows for a in row["turn_advantages"])
    assert trained > 40


def test_the_points_of_a_checkpoint_are_those_of_its_last_batch(whole):
    out = Path(whole.args.output_dir)
    rows = [json.loads(line) for line in (out / "rollouts.rank0.jsonl").read_text().splitlines()]
    lengths = sorted(len(row["turns"]) for row in rows if row["step"] == 1 and not row["num_copied_turns"])
    saved = json.loads((out / f"checkpoint-2/{BRANCH_POINTS}").read_text())["turns"]
    assert sorted(length for length, count in saved for _ in range(count)) == lengths


def test_a_resumed_run_trains_the_same(whole, tmp_path):
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(Path(whole.args.output_dir) / "checkpoint-2", folder)
    trainer = make(tmp_path)
    trainer.train(resume_from_checkpoint=str(folder))
    assert torch.equal(weights(trainer), weights(whole))


def test_an_evaluation_has_no_trees(whole, tmp_path):
    trainer = make(tmp_path, per_device_eval_batch_size=4, num_generations_eval=2, max_steps=1, save_strategy="no")
    trainer.eval_dataset = trainer.train_dataset.select(range(4))
    found = trainer.evaluate()
    assert found["eval_reward"] > 0 and not any("tree/" in name for name in found)
    assert [rollout.num_copied for rollout in trainer.batch.rollouts] == [0] * len(trainer.batch.rollouts)


def test_states_differ_from_step_to_step(whole):
    """And from tree to tree; a step's are the same however often they are asked for."""

    def drawn(step):
        whole.state.global_step = step
        rollouts = whole.env.start(["What?"] * 12)
        for index, rollout in enumerate(rollouts):
            rollout.place(index)
        whole.in_flight.plant(rollouts)
        return [rollout.forks[0].at for rollout in rollouts[::3]]

    whole.model.train()
    steps = [drawn(step) for step in range(12)]
    assert steps == [drawn(step) for step in range(12)] and len(set(map(tuple, steps))) > 3
    assert any(len(set(step)) > 1 for step in steps)


def test_a_lost_rollout_takes_its_tree_with_it():
    """Of the first tree the trunk is lost, of the second nothing: the first is rolled out again as a whole."""
    started, closed = [], []

    class Over:
        seconds = waited = 0.0

        def __init__(self, places, lost):
            self.rollouts, self.lost = [SimpleNamespace(index=6 + place) for place in places], lost

        def wait(self):
            return [None if rollout.index - 6 in self.lost else rollout for rollout in self.rollouts]

    def start(rows, places):
        started.append(places)
        return Over(places, {0} if len(started) == 1 else set())

    trainer = SimpleNamespace(
        args=SimpleNamespace(num_branches=2, branch_states=1, read_of_credit={"num_branches"}, max_staleness=0),
        accelerator=SimpleNamespace(process_index=1, is_main_process=False),
        model=SimpleNamespace(training=True), weight_sync=None,
        env=SimpleNamespace(close=closed.extend), llm=SimpleNamespace(retries=0, joined=[0]),
        state=SimpleNamespace(global_step=0), _start_rollouts=start, _stop_if_asked=lambda: None,
        _sync_weights=lambda: None, _on_all_ranks=lambda function, what: function(),
    )  # fmt: skip
    rollouts, metrics = InFlight(trainer).complete([{}] * 6)
    assert started == [[0, 1, 2, 3, 4, 5], [0, 1, 2]] and metrics["rollout/restarted"] == 3
    assert [rollout.index for rollout in rollouts] == [6, 7, 8, 9, 10, 11]
    assert [rollout.index for rollout in closed] == [6, 7, 8]


# --- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"scale_rewards": "group"}, "scale_rewards='group': the values of states are in units of the rewards"),
        ({"num_generations": 4}, "num_generations=4 is no number of trees of 3 rollouts .* set num_generations: 6"),
        ({"num_generations": 3, "per_device_train_batch_size": 3}, "two trees at least: set num_generations: 6"),
        (
            {"branch_states": 3, "num_generations": 14, "per_device_train_batch_size": 14},
            "branch_states=3: a rollout passes at most max_env_steps=2 states",
        ),
        ({"turn_discount": 0.5}, "turn_discount=0.5 has no effect with credit_assignment='tree'"),
        ({"credit_assignment": "outcome"}, "num_branches=2 has no effect .* or use tree"),
        (
            {"credit_assignment": "gigpo", "num_branches": 1, "branch_states": 2},
            "branch_states=2 has no effect .* or use tree",
        ),
        ({"num_branches": 0}, "num_branches=0, expected a finite number of at least 1"),
        ({"loss_type": "vespo"}, "credit_assignment='tree' gives per turn"),
    ],
)
def test_settings_that_make_no_trees(tmp_path, changes, says):
    with pytest.raises(ValueError, match=says):
        make(tmp_path, **changes)


def test_a_tree_is_of_one_process():
    """Two ranks of nine rollouts have three trees each; of six, of four rollouts each, they have none."""
    args = SimpleNamespace(
        credit_assignment="tree", scale_rewards="none", max_env_steps=2, branch_states=1, num_branches=2, world_size=2,
        num_generations=6, generation_batch_size=18, read_of_credit={"num_branches"},
    )  # fmt: skip
    check_trees(args)
    args.num_branches, args.num_generations, args.generation_batch_size = 3, 12, 12
    with pytest.raises(ValueError, match="6 rollouts of a process are no number of trees of 4 .* a multiple of 4"):
        check_trees(args)


def test_conversations_that_cannot_be_copied(tmp_path):
    with pytest.raises(ValueError, match="and NotCopied cannot be copied. Give it a method fork"):
        make(tmp_path, environment=type("NotCopied", (), {"reset": lambda self, **row: "x"}))

    def remote(text: str) -> str:
        """Ask a server.

        Args:
            text: What.
        """
        return text

    remote.holds_state = True
    with pytest.raises(ValueError, match="the server of the tool 'remote' may keep a state"):
        make(tmp_path, tools=[remote])


@pytest.mark.parametrize("recipe, says", [
    ("agent", "it is not known whether AgentConversation allows it: an agent or a scheduler does not"),
    ("scheduler", "it is not known whether SchedulerConversation allows it: an agent or a scheduler does not"),
    ("mcp", "the server of the tool '.*' may keep a state. Use another credit_assignment"),
    ("frozen_lake", "FrozenLake-v1, which is an adapter's, cannot be copied"),
    ("tools-yaml", "calculator, which is an adapter's, cannot be copied"),
])  # fmt: skip
def test_what_holds_a_state_that_is_not_known_is_refused_before_weights_are_loaded(
    tmp_path, monkeypatch, recipe, says
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("weights"))
    flags = ["--credit_assignment", "tree", "--scale_rewards", "none", "--output_dir", str(tmp_path)]
    with pytest.raises(ValueError, match=f"credit_assignment: tree: rollouts go on from a state .*{says}"):
        build_trainer(*parse_arguments(["--config", f"hf_recipes/tiny/{recipe}.yaml", *flags]))


def test_a_subclass_says_it_of_itself(tmp_path):
    """What it keeps of a conversation is known to nobody else."""

    class Own(MultiTurnToolEnv):
        pass

    args = MTGRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, credit_assignment="tree", scale_rewards="none", max_env_steps=2
    )
    with pytest.raises(ValueError, match="it is not known whether Own allows it.* set can_fork = True"):
        check_env(args, Own([calculator]))
    check_env(args, Kept([calculator]))
    check_env(args, MultiTurnToolEnv([calculator]))


def test_fork_is_no_tool_and_its_signature_is_checked():
    env = MultiTurnToolEnv(environment=Counter)
    assert list(env.environments.tools_of_class({})) == ["add"]

    class Takes(Counter):
        def fork(self, url: str) -> str:
            """Fork a repository.

            Args:
                url: Of it.
            """

    with pytest.raises(ValueError, match=r"Takes\.fork.* clashes with the trainer's method fork\(self\)"):
        MultiTurnToolEnv(environment=Takes)

    class Tells(Counter):
        def fork(self) -> str:
            """Fork it."""

    with pytest.raises(ValueError, match="Tells.fork returns a text, as a tool does"):
        MultiTurnToolEnv(environment=Tells)

"""A batch of eight conversations with rewards of every kind, and what must come of it, all written by hand.

Run by test_batch.py in one process and by distributed_worker.py in two: neither is compared with the other alone.
"""

import asyncio
import re
from pathlib import Path

from datasets import Dataset
from project import SMALL, json_lines

from mt_grpo.base.event_loop import start_in_background
from mt_grpo.rollout import Generation
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv, VLLMServerClient

ROWS = [{"prompt": [{"role": "user", "content": f"What is {n}?"}], "answer": n} for n in ("17", "42", "99")]

# What each rollout does, turn by turn. C: a call that gets its result. c: a call after the last result that it may
# have (max_env_steps 2), which ends it by MAX_TURNS. a: an answer. Four rollouts of one prompt, and four of another.
# INVARIANT: the second four have fewer turns, so that with two processes each has a number of turns of its own.
CONVERSATIONS = ["CCc", "Ca", "a", "CCc", "Ca", "Ca", "a", "Ca"]

# The rewards by rollout, and the weights of the functions.
TURN_A = [[0.5, 0.0, 0.25], [1.0, None], [None], [None, 1.0, 0.75], [0.25, 2.0], [0.75, None], [1.0], [1.0, 1.0]]
TURN_B = [[None, 1.0, None], [0.5, None], [1.0], [None] * 3, [None, None], [0.5, None], [None], [1.0, 0.0]]
ROLLOUT_A = [0.875, None, 0.25, 0.0, None, 1.0, 0.5, 1.0]
ROLLOUT_B = [None, None, 1.0, 2.0, None, None, 1.0, 1.0]
OUTCOME_A = [1.0, 0.0, None, 0.5, 1.0, None, 0.0, None]
OUTCOME_B = [None, 1.0, 1.0, 0.0, 0.0, 1.0, 2.0, None]
TURN_WEIGHTS, OUTCOME_WEIGHTS = [1.0, 0.5, 2.0, 0.25], [3.0, 0.5]

SCORED = range(7)  # rollout 7 has no outcome: it is not trained, and in no mean
# The weighted sums: r_k = A + B/2; per rollout 2 A + B/4; R^O = 3 A + B/2. Rollout 7 has no outcome: in no baseline.
TURN_REWARDS = [[0.5, 0.5, 0.25], [1.25, None], [0.5], [None, 1.0, 0.75], [0.25, 2.0], [1.0, None], [1.0], [1.5, 1.0]]
# per rollout      1.75            none         0.75   0.5                none         2.0          1.25   -
# R^O              3.0             0.5          0.5    1.5                3.0          0.5          1.0    none
# R^T              3.0             1.25         1.25   2.25               2.25         3.0          2.25   -
# R^O centred      1.625          -0.875       -0.875  0.125              1.5         -1.0         -0.5    -

# Turn 0: 0.5, 1.25, 0.5 around 0.75; 0.25, 1.0, 1.0 around 0.75. Turn 1: 0.5, 1.0 around 0.75; 2.0 is alone. Turn 2:
# 0.25, 0.75 around 0.5. Rollouts without a result are in these means, and have no such term.
# Per rollout 1.75, 0.75, 0.5 around 1.0, and 2.0, 1.25 around 1.625: on the turns up to the first result.
# Rollouts without a result: R^O + R^T/2 = 1.125 around 9.375/4, and 2.125 around 8.25/3. All with the coefficient 0.5.
MT_GRPO = [
    [1.625 + 0.5 * (-0.25 + 0.75), 1.625 + 0.5 * -0.25, 1.625 + 0.5 * -0.25], [-0.875 + 0.5 * 0.5, -0.875],
    [1.125 - 2.34375], [0.125 + 0.5 * -0.5, 0.125 + 0.5 * 0.25, 0.125 + 0.5 * 0.25],
    [1.5 + 0.5 * -0.5, 1.5], [-1.0 + 0.5 * (0.25 + 0.375), -1.0], [2.125 - 2.75], [0.0, 0.0],
]  # fmt: skip
# Returns with the discount 0.5. Turn 0: 0.8125, 1.25, 0.5, 0.6875 around 0.8125; 1.25, 1, 1 around 13/12.
# Turn 1: 0.625, 0, 1.375 around 2/3; 2, 0 around 1. Turn 2: 0.25, 0.75 around 0.5. Per rollout as above.
TURN_RETURN = [
    [1.625 + 0.5 * 0.75, 1.625 + 0.5 * (0.625 - 2 / 3), 1.625 - 0.5 * 0.25],
    [-0.875 + 0.5 * 0.4375, -0.875 - 0.5 * 2 / 3], [-0.875 + 0.5 * (-0.3125 - 0.25)],
    [0.125 + 0.5 * (-0.125 - 0.5), 0.125 + 0.5 * (1.375 - 2 / 3), 0.125 + 0.5 * 0.25],
    [1.5 + 0.5 / 6, 1.5 + 0.5], [-1.0 + 0.5 * (-1 / 12 + 0.375), -1.0 - 0.5], [-0.5 + 0.5 * (-1 / 12 - 0.375)],
    [0.0, 0.0],
]  # fmt: skip
# Within a rollout, where two turns or more have a reward: 0.5, 0.5, 0.25 around 5/12; 1, 0.75 around 7/8; 0.25, 2
# around 9/8. Nothing per rollout.
ZERO_SUM = [
    [1.625 + 0.5 / 12, 1.625 + 0.5 / 12, 1.625 - 0.5 / 6], [-0.875] * 2, [-0.875],
    [0.125, 0.125 + 0.5 / 8, 0.125 - 0.5 / 8], [1.5 - 0.5 * 7 / 8, 1.5 + 0.5 * 7 / 8], [-1.0] * 2, [-0.5], [0.0, 0.0],
]  # fmt: skip
# Progress with the discount 0.5: -1/4 at turn 2, of which the turns get 1/7, 2/7 and 4/7, around -1/12; 7/4 at turn 1,
# of which they get 1/3 and 2/3, around 65/84, as a call has 66 tokens and an answer 32.
PROGRESS = [
    [1.625 + 0.5 / 21, 1.625 + 0.5 / 84, 1.625 - 0.5 * 5 / 84], [-0.875] * 2, [-0.875],
    [0.125 + 0.5 / 21, 0.125 + 0.5 / 84, 0.125 - 0.5 * 5 / 84], [1.5 - 0.5 * 4 / 21, 1.5 + 0.5 * 11 / 28],
    [-1.0] * 2, [-0.5], [0.0, 0.0],
]  # fmt: skip
# One group of eight: R^O + R^T, of which seven count.
MEAN = 25.25 / 7
MERGED = [[6.0 - MEAN] * 3, [1.75 - MEAN] * 2, [1.75 - MEAN], [3.75 - MEAN] * 3, [5.25 - MEAN] * 2, [3.5 - MEAN] * 2,
          [3.25 - MEAN], [0.0, 0.0]]  # fmt: skip
# One group of eight, by turn: R^O, the returns, and per rollout around 1.25. Turn 0 is in one state by its tokens, the
# others by the key: returns around 6.5 / 7, 4 / 5 and 1 / 2.
GIGPO = [
    [o - 10 / 7 + 0.5 * (r - mean + p * (k == 0)) for k, (r, mean) in enumerate(zip(returns, (6.5 / 7, 0.8, 0.5)))]
    for o, p, returns in zip(
        [3.0, 0.5, 0.5, 1.5, 3.0, 0.5, 1.0], [0.5, 0.0, -0.5, -0.75, 0.0, 0.75, 0.0],
        [[0.8125, 0.625, 0.25], [1.25, 0.0], [0.5], [0.6875, 1.375, 0.75], [1.25, 2.0], [1.0, 0.0], [1.0]],
    )
] + [[0.0, 0.0]]  # fmt: skip
# Standard deviations of the two groups: sqrt(4.1875 / 3) and sqrt(3.5 / 2), and 1e-4.
FIRST, SECOND = 1.1814539 + 1e-4, 1.3228757 + 1e-4
OUTCOME = [[1.625 / FIRST] * 3, [-0.875 / FIRST] * 2, [-0.875 / FIRST], [0.125 / FIRST] * 3, [1.5 / SECOND] * 2,
           [-1.0 / SECOND] * 2, [-0.5 / SECOND], [0.0, 0.0]]  # fmt: skip

CASES = {  # name -> (advantages of the turns, settings, conversations that a restart of the server takes away)
    "mt_grpo": (MT_GRPO, dict(num_generations=4, credit_assignment="mt_grpo", scale_rewards="none",
                         turn_advantage_coef=0.5), ()),
    "turn_return": (
        TURN_RETURN, dict(num_generations=4, credit_assignment="turn_return", scale_rewards="none",
                          turn_discount=0.5, turn_advantage_coef=0.5), (1, 6, 7)),
    "gigpo": (GIGPO, dict(num_generations=8, credit_assignment="gigpo", scale_rewards="none", turn_discount=0.5,
                          turn_advantage_coef=0.5), ()),
    "zero_sum": (ZERO_SUM, dict(num_generations=4, credit_assignment="zero_sum", scale_rewards="none",
                                turn_advantage_coef=0.5), ()),
    "progress_credit": (PROGRESS, dict(num_generations=4, credit_assignment="progress_credit", scale_rewards="none",
                                       turn_discount=0.5, turn_advantage_coef=0.5), ()),
    "merged": (MERGED, dict(num_generations=8, credit_assignment="merged", scale_rewards="none"), ()),
    "outcome": (OUTCOME, dict(num_generations=4, credit_assignment="outcome", scale_rewards="group"), ()),
    "evaluation": (
        MT_GRPO, dict(num_generations=8, num_generations_eval=4, credit_assignment="mt_grpo",
                      scale_rewards="none", turn_advantage_coef=0.5), ()),
}  # fmt: skip


def echo(text: str) -> str:
    """Return the text.

    Args:
        text: What to return.
    """
    return text


class ScriptedServer(VLLMServerClient):
    """Plays the conversations above and names in each turn the rollout and the number that its prompt asks for.

    The first time it loses the conversations of these rollouts, as a server does that restarts.
    """

    def __init__(self, tokenizer, lost=()):
        super().__init__(tokenizer=tokenizer)
        self.lost, self.lost_so_far, self.params = lost, [], []

    async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
        history = self.tokenizer.decode(prompt_ids)
        self.params.append(sampling_params)
        turn = history.count("</result>")
        said = f"rollout {index} of {re.search(r'What is (..)', history)[1]}"
        call = f'<tool>{{"name": "echo", "args": {{"text": "{said}"}}}}</tool>'
        text = f"<answer>{said}</answer>" if CONVERSATIONS[index % 8][turn] == "a" else call
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Generation(ids, [-0.125 * (turn + 1)] * len(ids), "stop")

    def start_conversations(self, conversations, *_):
        return start_in_background(self.lose_some(conversations))

    async def lose_some(self, conversations):
        rollouts, lost = await asyncio.gather(*conversations), self.lost
        self.lost = ()
        self.lost_so_far += [rollout.index for rollout in rollouts if rollout.index in lost]
        return [None if rollout.index in lost else rollout for rollout in rollouts]


def rollout_numbers(completions):
    return [int(re.search(r"rollout (\d+)", messages[0]["content"])[1]) % 8 for messages in completions]


def turn_a(completions, **kwargs):
    return [TURN_A[i] for i in rollout_numbers(completions)]


def turn_b(completions, **kwargs):
    return [TURN_B[i] for i in rollout_numbers(completions)]


def rollout_a(completions, **kwargs):
    return [ROLLOUT_A[i] for i in rollout_numbers(completions)]


def rollout_b(completions, **kwargs):
    return [ROLLOUT_B[i] for i in rollout_numbers(completions)]


def outcome_a(completions, prompts, completion_ids, rollout_turns, answer, **kwargs):
    """Raises where anything that it gets for a rollout belongs to another prompt or rollout."""
    for messages, prompt, ids, turns, gold in zip(
        completions, prompts, completion_ids, rollout_turns, answer, strict=True
    ):
        if prompt[-1]["content"] != f"What is {gold}?":
            raise ValueError(f"{prompt} is graded by the answer {gold}")
        if not all(message["content"].count(f" of {gold}") == 1 for message in messages):
            raise ValueError(f"{messages} are graded by the answer {gold}")
        if [turn.text for turn in turns] != [m["content"] for m in messages if m["role"] == "assistant"]:
            raise ValueError(f"{turns} are not the turns of {messages}")
        called = [each["function"] for message in messages for each in message.get("tool_calls", [])]
        if called != [{"name": each.name, "arguments": each.arguments} for turn in turns for each in turn.calls]:
            raise ValueError(f"{called} are not the calls of {turns}")
        if ids != [i for turn in turns for i in turn.token_ids + turn.observation_ids]:
            raise ValueError(f"{ids} are not the ids of {turns}")
    return [OUTCOME_A[i] for i in rollout_numbers(completions)]


def outcome_b(completions, **kwargs):
    return [OUTCOME_B[i] for i in rollout_numbers(completions)]


FUNCS = [turn_a, turn_b, rollout_a, rollout_b], [outcome_a, outcome_b]
NAMES = [func.__name__ for func in FUNCS[0] + FUNCS[1]]


def state_key(turns):
    """A text, whose hash differs from process to process; None for the first turn, whose tokens are its state."""
    return f"after {len(turns)}" if turns else None


def make_trainer(model, out, funcs=FUNCS, **changes):
    args = dict(
        output_dir=str(out), per_device_train_batch_size=8, per_device_eval_batch_size=8, max_completion_length=512,
        max_env_steps=2, log_rollouts=8, max_steps=1,
    )  # fmt: skip
    return MTGRPOEnvTrainer(
        model, MultiTurnToolEnv([echo], system_prompt=None, max_steps=2, state_key=state_key),
        turn_reward_funcs=funcs[0], outcome_reward_funcs=funcs[1],
        turn_advantage_coef=changes.pop("turn_advantage_coef", None),
        turn_reward_weights=TURN_WEIGHTS[: len(funcs[0])], outcome_reward_weights=OUTCOME_WEIGHTS[: len(funcs[1])],
        args=MTGRPOConfig(**{**SMALL, **args, **changes}),
        train_dataset=Dataset.from_list(ROWS), eval_dataset=Dataset.from_list(ROWS),
    )  # fmt: skip


def run_case(model, out, name, world=1, funcs=FUNCS):
    """The batch as it reaches the loss (rows of this rank's rollouts), the metrics, and the log of rollouts."""
    _, settings, lost = CASES[name]
    out = Path(out) / name
    share = 8 // world
    trainer = make_trainer(model, out, funcs, per_device_train_batch_size=share, **settings)
    trainer.llm = ScriptedServer(trainer.processing_class, lost)
    trainer.model.train(name != "evaluation")
    group_size = settings.get("num_generations_eval", settings["num_generations"])
    first = trainer.accelerator.process_index * share
    batch = [ROWS[i // group_size] for i in range(8)][first : first + share]
    output = trainer._generate_and_score_completions(batch)
    mode = "train" if trainer.model.training else "eval"
    metrics = {key: values[-1] for key, values in trainer._metrics[mode].items()}
    log = json_lines(out / f"rollouts.rank{trainer.accelerator.process_index}.jsonl")
    keys = ("advantages", "completion_mask", "tool_mask", "sampling_per_token_logps")
    rows = {key: output[key].tolist() for key in keys}
    for key in ("prompt_ids", "completion_ids"):
        rows[key] = trainer.processing_class.batch_decode(output[key])
    return {"rows": rows, "metrics": metrics, "log": log, "lost": trainer.llm.lost_so_far}


def per_token(index, of_turns, of_results):
    """One number per token of a rollout: a byte of what was said is a token, and so is each control token."""
    numbers = []
    for kind, value in zip(CONVERSATIONS[index], of_turns, strict=True):
        said = f"rollout {index} of 42"
        call = '<tool>{"name": "echo", "args": {"text": ""}}</tool>' + said
        numbers += [value] * len("<answer></answer>" + said if kind == "a" else call)
        if kind == "C":
            numbers += [of_results] * len(f"E\nSuser\n<result>\n{said}\n</result>E\nSassistant\n")
    return numbers


def assert_as_written(result, name, world=1, rank=0, close=1e-5):
    """What `run_case` returned is what stands above."""
    advantages, settings, lost = CASES[name]
    share = 8 // world
    indices = range(rank * share, (rank + 1) * share)
    group_size = settings.get("num_generations_eval", settings["num_generations"])
    assert result["lost"] == [i for i in lost if i in indices]

    rows = result["rows"]
    for place, index in enumerate(indices):
        turns = CONVERSATIONS[index]
        number = ROWS[index // group_size]["answer"]
        prompt = f"<|im_start|>user\nWhat is {number}?<|im_end|>\n<|im_start|>assistant\n"
        assert rows["prompt_ids"][place] == prompt, index
        call = f'<tool>{{"name": "echo", "args": {{"text": "rollout {index} of {number}"}}}}</tool>'
        first = f"<answer>rollout {index} of {number}</answer>" if turns[0] == "a" else call
        assert rows["completion_ids"][place].startswith(first), index
        whole = per_token(index, [1] * len(turns), 1)
        width = len(rows["completion_mask"][place])
        padding = [0] * (width - len(whole))
        assert rows["completion_mask"][place] == whole + padding, index
        trained = per_token(index, [1] * len(turns), 0)
        assert rows["tool_mask"][place][: len(whole)] == [n * (index in SCORED) for n in trained], index
        logprobs = per_token(index, [-0.125 * (k + 1) for k in range(len(turns))], 0.0)
        assert rows["sampling_per_token_logps"][place] == logprobs + padding, index
        expected = per_token(index, advantages[index], 0.0) + padding
        assert max(abs(a - b) for a, b in zip(rows["advantages"][place], expected, strict=True)) < close, (
            index, rows["advantages"][place], expected,
        )  # fmt: skip

    assert len(result["log"]) == share
    for index, row in zip(indices, result["log"], strict=True):
        assert (row["index"], row["mode"]) == (index, "eval" if name == "evaluation" else "train")
        assert row["answer"] == ROWS[index // group_size]["answer"]
        assert row["messages"][0]["content"] == f"What is {row['answer']}?"
        assert row["messages"][1]["content"].count(f"rollout {index} of {row['answer']}") == 1
        assert row["stop_reason"] == ("max_turns" if CONVERSATIONS[index].endswith("c") else "answered")
        sums = [[v for v in table[index] if v is not None] for table in (TURN_A, TURN_B)]
        of_rollout = [table[index] for table in (ROLLOUT_A, ROLLOUT_B, OUTCOME_A, OUTCOME_B)]
        assert row["rewards"] == dict(zip(NAMES, [sum(s) if s else None for s in sums] + of_rollout, strict=True))
        assert row["turn_rewards"] == TURN_REWARDS[index] and (row["reward"] is not None) == (index in SCORED)
        differences = [abs(a - b) for a, b in zip(row["turn_advantages"], advantages[index], strict=True)]
        assert max(differences) < close

    metrics = result["metrics"]
    expected = {
        "turns/mean": 2.0, "turns/max": 3.0, "stop/max_turns": 2 / 8, "stop/answered": 6 / 8,
        "tools/call_frequency": 10 / 8, "completions/clipped_ratio": 0.0,
        "rewards/turn_a/mean": 7.5 / 6, "rewards/turn_b/mean": 3.0 / 4, "rewards/turn_b/frac_scored": 4 / 8,
        "rewards/rollout_a/mean": 2.625 / 5, "rewards/outcome_a/mean": 0.5, "rewards/outcome_b/mean": 5.0 / 6,
        "rewards/outcome_b/frac_scored": 6 / 8, "reward": 25.25 / 7, "frac_reward_scored": 7 / 8,
        "credit/frac_rollouts_trained": 7 / 8, "credit/frac_groups_without_signal": 0.0,
        "rollout/restarted": len(lost),
    }  # fmt: skip
    trained = [abs(v) for index, of_turns in enumerate(advantages) for v in per_token(index, of_turns, 0.0)]
    sampled = [v for index in SCORED for v in per_token(index, [1] * len(CONVERSATIONS[index]), 0)]
    expected["credit/mean_abs_advantage"] = sum(trained) / sum(sampled)
    for key, value in expected.items():
        assert abs(metrics[key] - value) < close, (key, metrics[key], value)

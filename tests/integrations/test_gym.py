"""Games of gymnasium: text, actions, rewards of steps, and what a recipe says. The policy is scripted."""

import asyncio
import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from project import ROOT
from scripted import ScriptedTexts
from transformers import AutoTokenizer

import mt_grpo_trainer as mt
from mt_grpo.integrations.gym.environment import gym_environment
from mt_grpo.integrations.gym.text import GymText
from mt_grpo.recipe.plugins import load_class, load_conversation
from mt_grpo.rollout import StopReason

MODEL = ROOT / "hf_recipes/tiny/gym-model"
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)
END = [TOKENIZER.eos_token_id]
LAKE_RULES = "Answer with an action as <action>...</action>: left, down, right or up.\n"
FrozenLakeText = load_class(f"{ROOT}/tools/gym/frozen_lake.py:FrozenLakeText", "gym_text")
OWN_GAMES = '''
"""Games with each kind of space."""

import gymnasium
from gymnasium import spaces

from mt_grpo import GymText


class Steps(gymnasium.Env):
    """Three steps of reward 0.5; it is cut after `most`."""

    observation_space, action_space = spaces.Text(20), spaces.Discrete(3, start=-1)

    def __init__(self, most=9):
        self.most = most

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_number = (options or {}).get("from", 0)
        return f"Step {self.step_number}.", {}

    def step(self, action):
        self.step_number += 1
        return f"Step {self.step_number}.", 0.5, self.step_number == 3, self.step_number >= self.most, {"took": action}


class Loud(GymText):
    def rules(self):
        return "Play!\\n"
'''


@pytest.fixture
def games(tmp_path):
    """The path of a file with games."""
    path = tmp_path / "games.py"
    path.write_text(OWN_GAMES)
    return path


def lake(**settings):
    make = lambda: gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="ansi")  # noqa: E731
    return gym_environment(
        make, "FrozenLake-v1", text_class=FrozenLakeText, actions=("left", "down", "right", "up"), **settings
    )


def steps_game(games, unfinished_reward=0.0, **kwargs):
    cls = load_class(f"{games}:Steps", "gym_env")
    return gym_environment(lambda: cls(**kwargs), "Steps", unfinished_reward=unfinished_reward)


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def play(cls, *turns, rows=({},), max_steps=19, prompt="", **settings):
    backend = ScriptedTexts(*turns, tokenizer=TOKENIZER)
    settings = {"tokenizer": TOKENIZER, "tool_format": "hermes", "max_steps": max_steps, **settings}
    env = mt.MultiTurnToolEnv([], None, environment=cls, **settings)
    prompts = [[{"role": "user", "content": prompt}] if prompt else [] for _ in rows]
    rows = [{**row, "prompt": each} if each else row for row, each in zip(rows, prompts, strict=True)]
    return env.generate(prompts, backend, rows=list(rows))["rollouts"], backend


def act(name):
    return f"<action>{name}</action>"


@pytest.mark.contract("gymnasium")
def test_an_episode_of_frozen_lake_by_hand():
    """What is read, token for token, and what each turn is worth."""
    path = ["down", "down", "right", "right", "down", "right"]
    (rollout,), backend = play(lake(), *map(act, path))
    seen = ids(f"<|im_start|>user\n{LAKE_RULES}[S]FFF\nFHFH\nFFFH\nHFFG<|im_end|>\n<|im_start|>assistant\n")
    boards = ["SFFF\n[F]HFH\nFFFH\nHFFG", "SFFF\nFHFH\n[F]FFH\nHFFG", "SFFF\nFHFH\nF[F]FH\nHFFG",
              "SFFF\nFHFH\nFF[F]H\nHFFG", "SFFF\nFHFH\nFFFH\nHF[F]G"]  # fmt: skip
    for name, board, (prompt, _) in zip(path, [*boards, ""], backend.asked, strict=True):
        assert prompt == seen
        seen = seen + ids(act(name)) + END + ids(f"\n<|im_start|>user\n{board}<|im_end|>\n<|im_start|>assistant\n")
    assert [turn.reward for turn in rollout.turns] == [0, 0, 0, 0, 0, 1.0]
    assert rollout.reward == 1.0 and rollout.error is None and len(rollout.turns) == 6
    assert (rollout.environment.terminated, rollout.environment.truncated) == (True, False)
    assert rollout.turns[-1].observation is None
    (record,) = rollout.records
    said = sum(len(turn.token_ids) for turn in rollout.turns)
    assert sum(record.loss_mask) == said == 6 * len([*ids(act("down")), *END])


def test_states_are_the_boards_and_a_rows_prompt_stands_before_the_rules():
    """The key of a turn is what was seen before it. So a step against the wall begins in the same state again."""
    (rollout,), _ = play(lake(), act("left"), act("right"), act("down"))
    start, right = "[S]FFF\nFHFH\nFFFH\nHFFG", "S[F]FF\nFHFH\nFFFH\nHFFG"
    assert [turn.state_key for turn in rollout.turns] == [start, start, right]
    (rollout,), _ = play(lake(), act("left"), prompt="Reach G.", max_steps=0)
    assert rollout.prompt_ids == ids(
        f"<|im_start|>user\nReach G.\n{LAKE_RULES}[S]FFF\nFHFH\nFFFH\nHFFG<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("text, got", [(act("jump"), "'jump'"), ("", "''"), ("left down", "'left down'")])
def test_a_text_that_is_no_action_moves_nothing(text, got):
    (rollout,), _ = play(lake(), text, "DOWN", max_steps=1)
    error = f"Error: expected an action as <action>...</action>: left, down, right or up. Got {got}."
    assert rollout.turns[0].observation_ids == ids(f"\n<|im_start|>user\n{error}<|im_end|>\n<|im_start|>assistant\n")
    assert rollout.turns[0].reward is None
    assert rollout.environment.env.unwrapped.s == 4 and rollout.environment.rewards == [0.0]


def test_what_was_thought_is_no_action():
    """Of several actions the last counts."""
    game = lake()()
    game.reset()
    text = "<think>I say <action>up</action>.</think> First <action>right</action>, no: <action>down</action>"
    game.respond(None, mt.Turn([], None, text, "stop"))
    assert game.env.unwrapped.s == 4
    for text, thinks in (("<think><action>down</action>", True), ("<think><action>down</action></think> So.", False)):
        reply = game.respond(None, mt.Turn([], None, text, "stop", open_thinking=thinks))
        assert game.env.unwrapped.s == 4 and reply.messages[0]["content"].startswith("Error: expected an action")


def test_blackjack_reads_its_cards_as_json():
    make = lambda: gymnasium.make("Blackjack-v1", sab=True)  # noqa: E731
    rows = [{"seed": 3}, {"seed": 3}, {"seed": 4}]
    rollouts, _ = play(gym_environment(make, "B", actions=("stick", "hit")), act("stick"), rows=rows)
    first, again, other = [rollout.prompt_ids for rollout in rollouts]
    game = gymnasium.make("Blackjack-v1", sab=True)
    cards = json.dumps(list(game.reset(seed=3)[0]))
    rules = "Answer with an action as <action>...</action>: stick or hit.\n"
    assert first == again == ids(f"<|im_start|>user\n{rules}{cards}<|im_end|>\n<|im_start|>assistant\n")
    assert other != first
    reward = game.step(0)[1]
    assert rollouts[0].reward == rollouts[1].reward == reward and rollouts[0].turns[0].reward == reward


SPACES = [
    (spaces.Discrete(3, start=-1), "a whole number from -1 to 1", {"-1": -1, "1": 1},
     ["2", "1.0", "true", "one", "9" * 5000, "<action>" * 200_000]),
    (spaces.Text(5, charset="ab"), "a text of 1 to 5 of the characters ab", {"ab": "ab"}, ["aaaaaa", "a-b"]),
    (spaces.MultiDiscrete([2, 3]), None, {"[1, 2]": [1, 2]}, ["[1]", "[1, 3]", "[0.5, 1]", "5", '["a", 1]']),
    (spaces.MultiBinary(2), None, {"[1, 0]": [1, 0]}, ["[2, 0]", "[256, 0]"]),
    (spaces.Box(-1, np.inf, (2,)), None, {"[0.5, -1]": [0.5, -1]},
     ["[-2, 0]", "[0.5]", '"x"', "NaN", "[NaN, 0]", '["0", "0"]', "[true, false]", "[1e39, 0]"]),  # of float32
]  # fmt: skip


@pytest.mark.parametrize("space, words, members, others", SPACES, ids=[type(case[0]).__name__ for case in SPACES])
def test_each_space_takes_its_members_alone(games, space, words, members, others):
    game = load_class(f"{games}:Steps", "gym_env")()
    game.action_space = space
    text = GymText(game)
    assert text.choices() == (words or f"JSON of {space}")
    for said, expected in members.items():
        action = text.action(act(said))
        assert space.contains(action) and np.array_equal(action, expected)
    for said in [*others, "[" * 5000]:
        with pytest.raises(ValueError, match="expected an action as"):
            text.action(act(said))


def test_names_must_fit_the_space_and_observations_are_text(games):
    """Marked places of a drawing stand in brackets. What is not drawn is JSON, with six digits of a float."""
    game = load_class(f"{games}:Steps", "gym_env")()
    for names in (("a", "b"), ("a", "b", "b"), ("a", "b", "c", "d"), ("a", "b", "A")):
        with pytest.raises(ValueError, match="gym_actions is"):
            GymText(game, names)
    text = GymText(game, ("a", "b", "Cut"))
    assert [text.action(name) for name in ("a", "A", "cut", "CUT", "Cut")] == [-1, -1, 1, 1, 1]  # it begins at -1
    game = load_class(f"{games}:Steps", "gym_env")()
    game.render_mode = "ansi"
    drawings = {
        "\x1b[41mS\x1b[0mF\x1b[33mG\x1b[0m\n": "[S]F[G]",
        "|\x1b[42m\x1b[34;1mR\x1b[0m\x1b[0m: |": "|[R]: |",
        "\x1b[1m" * 20000: "",
    }
    for drawn, shown in drawings.items():
        game.render = lambda drawn=drawn: drawn
        assert GymText(game).observation(0, {}) == shown
    game.render_mode = None
    observation = {"city": "北京", "at": np.array([1, 2]), 3: (1 / 3, 12345.678)}
    assert GymText(game).observation(observation, {}) == '{"city": "北京", "at": [1, 2], "3": [0.333333, 12345.7]}'


def test_an_episode_that_ended_and_one_that_is_played_again(games):
    """Steps 1 and 2 go on, step 3 is the end; or `most` cuts the episode before."""
    (rollout,), _ = play(steps_game(games), "1", "0", "-1")
    game = rollout.environment
    assert (game.terminated, game.truncated, game.rewards, rollout.reward) == (True, False, [0.5, 0.5, 0.5], 1.5)
    assert [turn.reward for turn in rollout.turns] == [0.5, 0.5, 0.5]
    (rollout,), _ = play(steps_game(games, most=2, unfinished_reward=-9.0), "1", "0")
    game = rollout.environment
    assert (game.terminated, game.truncated, rollout.reward) == (False, True, 1.0)
    assert [turn.info for turn in rollout.turns] == [
        {"action": 1, "terminated": False, "truncated": False, "gym": {"took": 1}},
        {"action": 0, "terminated": False, "truncated": True, "gym": {"took": 0}},
    ]
    game = steps_game(games, unfinished_reward=-2.0)()
    for _ in range(2):
        assert game.reset().endswith("Step 0.")
        turn = mt.Turn([], None, "1", "stop")
        turn.reward = game.respond(None, turn).reward
        assert [game.get_reward(), game.get_reward(), turn.reward] == [-1.5] * 3  # what it costs is paid once
        assert asyncio.run(game.state_key()) == "Step 1."
    game.close()


CALL = '<tool_call>{"name": "x", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    "turns, stop, rewards, returned",
    [
        (["1", "0"], StopReason.MAX_TURNS, [0.5, 0.5 - 4.0], 1.0 - 4.0),
        (["1", "what?"], StopReason.MAX_TURNS, [0.5, -4.0], 0.5 - 4.0),
        (["1", ("0",)], StopReason.MAX_TOKENS, [0.5, -4.0], 0.5 - 4.0),
        (["1", (CALL + " and",)], StopReason.MAX_TOKENS, [0.5, -4.0], 0.5 - 4.0),
    ],
)
def test_an_episode_that_the_policy_left(games, turns, stop, rewards, returned):
    """What it costs is in the outcome and in the last turn, as a step's reward is. A cut-off turn is no step."""
    most = 1 if stop == StopReason.MAX_TURNS else 19
    (rollout,), _ = play(steps_game(games, unfinished_reward=-4.0), *turns, max_steps=most)
    assert (rollout.stop_reason, rollout.reward) == (stop, returned)
    assert [turn.reward for turn in rollout.turns] == rewards
    (rollout,), _ = play(steps_game(games), *turns, max_steps=most)
    assert rollout.reward == returned + 4.0


def test_a_turn_behind_which_nothing_fits_is_one_by_which_the_policy_left(games):
    """Its action was taken, and the observation has no room. Else long turns would be a way out that costs nothing."""
    for turns, rewards in ((["1", "0"], [0.5 - 4.0]), (["what?"], [-4.0])):
        budget = 2 * len(ids(turns[0]) + END)
        (rollout,), _ = play(steps_game(games, unfinished_reward=-4.0), *turns, max_completion_length=budget)
        assert rollout.stop_reason == StopReason.MAX_TOKENS and rollout.turns[-1].finish_reason == "stop"
        assert [turn.reward for turn in rollout.turns] == rewards and rollout.reward == sum(rewards)


def test_the_columns_of_a_row_begin_the_episode_in_which_a_call_is_text(games):
    """A game has no tools."""
    (rollout,), backend = play(steps_game(games), "1", rows=[{"options": {"from": 2}, "answer": "x"}])
    assert "Step 2." in TOKENIZER.decode(backend.asked[0][0]) and rollout.reward == 0.5
    (rollout,), backend = play(steps_game(games), f"{CALL} <action>1</action>", CALL, "1", "1")
    assert "unknown tool" not in TOKENIZER.decode(backend.asked[-1][0])
    assert [turn.reward for turn in rollout.turns] == [0.5, None, 0.5, 0.5]


def test_a_class_of_ones_own(games, monkeypatch):
    """Arguments on the command line are JSON."""
    monkeypatch.chdir(games.parent)
    (games.parent / "own.yaml").write_text(
        "environment: gym\ngym_env: games.py:Steps\ngym_text: games.py:Loud\nmax_env_steps: 3\n"
        "max_steps: 1\nuse_cpu: true\nbf16: false\n"
        f"dtype: float32\nmodel_name_or_path: {MODEL}\ntool_format: hermes\n"
    )
    arguments = ["--gym_kwargs", '{"most": 2}', "--gym_actions", "back", "stay", "on"]
    script_args, args, _ = mt.parse_arguments(["--config", "own.yaml", *arguments])
    game = load_conversation(script_args, args, mt.MultiTurnToolEnv)[1]()
    assert game.reset() == "Play!\nStep 0." and game.env.most == 2 and game.text.actions["on"] == 1

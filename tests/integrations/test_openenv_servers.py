"""`environment: openenv`: sessions of OpenEnv servers over HTTP and WebSockets. The policy is scripted."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import urllib.request

import pytest
from bench.common import free_port
from openenv_server import CALLS, Adds, Count, Served
from project import ROOT, trained
from scripted import QWEN3, Scripted, hermes_call as call, ids, make_tokenizer, verify

import mt_grpo_trainer as mt
from mt_grpo.base.event_loop import run_async
from mt_grpo.conversation.environments import EnvironmentFailure
from mt_grpo.integrations.openenv.environment import ActionRefused
from mt_grpo.recipe import plugins as choose
from mt_grpo.rollout import StopReason, Turn

TOKENIZER = make_tokenizer(QWEN3)
COLUMNS = {"type": "object", "required": ["column"], "properties": {"column": {"type": "integer"}}}


def load(*served, args=None, **keys):
    """The class of environments of a recipe."""
    urls = [each if isinstance(each, str) else each.url for each in served]
    script = mt.recipe_classes()[0](environment="openenv", openenv_url=urls[0] if len(urls) == 1 else urls, **keys)
    config = {"output_dir": "x", "use_cpu": True, "bf16": False, "tool_format": "hermes"} | (args or {})
    return choose.load_conversation(script, mt.MTGRPOConfig(**config), mt.MultiTurnToolEnv)[1]


def play(cls, *turns, rows=({},), prompt="", **settings):
    backend = Scripted([[turn + "<|im_end|>" for turn in turns]] * len(rows), tokenizer=TOKENIZER)
    env = mt.MultiTurnToolEnv([], None, environment=cls, tool_format="hermes", max_steps=9, **settings)
    prompts = [[{"role": "user", "content": prompt}] if prompt else [] for _ in rows]
    rows = [{**row, "prompt": each} if each else row for row, each in zip(rows, prompts)]
    rollouts = env.generate(prompts, backend, rows=rows)["rollouts"]
    verify(env, [rollout for rollout in rollouts if not rollout.failed], backend)
    return rollouts, backend


def rewards(rollout):
    return [turn.reward for turn in rollout.turns]


@pytest.fixture
def counting():
    with Served(Count) as served:
        yield served


@pytest.mark.contract("OpenEnv")
def test_an_episode_by_hand(counting):
    """What is read, token for token, the reward of each turn, and what reward functions get."""
    turns = ["1", "two", " ", " 5", "<think>Three.</think>3"]
    refused = "Error: message: String should have at least 1 character"
    (rollout,), backend = play(load(counting), *turns, rows=[{"answer": "x"}])
    seen = ids("<|im_start|>user\nSay 1.<|im_end|>\n<|im_start|>assistant\n")
    for text, answer, request in zip(turns, ["Say 2.", "Say a number.", refused, "Say 3.", ""], backend.requests):
        assert request.prompt == seen
        seen = seen + ids(f"{text}<|im_end|>\n<|im_start|>user\n{answer}<|im_end|>\n<|im_start|>assistant\n")
    assert len(backend.requests) == 5 and rewards(rollout) == [1.0, None, None, 0.0, 1.0] and rollout.reward == 2.0
    assert rollout.error is None and rollout.stop_reason == StopReason.ANSWERED
    states = ["Say 1.", "Say 2.", "Say a number.", "Say a number.", "Say 3."]
    assert [turn.state_key for turn in rollout.turns] == states
    sent = [data["message"] for kind, data in counting.received if kind == "step"]
    assert sent == ["1", "two", " ", "5", "3"]  # thinking is not sent
    environment = rollout.environment
    assert environment.state == {"step_count": 3} and environment.episode_done
    assert environment.step_rewards == [1.0, None, 0.0, 1.0]
    assert counting.closed.wait(60)
    (record,) = rollout.records
    assert sum(record.loss_mask) == sum(len(turn.token_ids) for turn in rollout.turns)


RULES = "Answer with an action as <action>...</action>: left, down, right or up.\n"
FLY = "Error: expected an action as <action>...</action>: left, down, right or up. Got 'fly'."
BEGIN, RIGHT, HOLE = "[S]FFF\nFHFH\nFFFH\nHFFG", "S[F]FF\nFHFH\nFFFH\nHFFG", "SFFF\nF[H]FH\nFFFH\nHFFG"


def message(**data):
    return json.dumps({"type": "observation", "data": data})


# What `openenv` 0.10 answered to tools/openenv/frozen_lake.py.
RECORDED = {
    "reset": message(observation={"metadata": {}, "text": RULES + BEGIN}, reward=None, done=False),
    "<action>right</action>": message(observation={"metadata": {}, "text": RIGHT}, reward=0.0, done=False),
    "fly": message(observation={"metadata": {}, "text": FLY}, reward=None, done=False),
    "<action>down</action>": message(observation={"metadata": {}, "text": HOLE}, reward=0.0, done=True),
}


def play_lake(url):
    """A conversation with the sample: it ends in a hole."""
    (rollout,), _ = play(load(url), *list(RECORDED)[1:], rows=[{"episode_id": "e"}])
    assert rewards(rollout) == [0.0, None, 0.0] and rollout.error is None
    assert rollout.prompt_messages == [{"role": "user", "content": RULES + BEGIN}]
    assert [turn.observation for turn in rollout.turns[:2]] == [RIGHT, FLY]
    assert rollout.turns[2].info["observation"]["text"] == HOLE
    assert type(rollout.environment).__name__ == "FrozenLake"
    return rollout


def test_recorded_answers_of_the_sample():
    answers = {"state": {}, "reset": lambda self, **_: RECORDED["reset"]}
    game = type("Replays", (), answers | {"step": lambda self, action: RECORDED[action["message"]]})
    with Served(game, name="FrozenLake") as served:
        play_lake(served.url)


def test_sessions_and_what_is_no_step(counting):
    cls = load(counting)
    arguments = {"start": 1, "seed": 5}, {"start": 0, "seed": 5}, {"start": 0, "goal": 1}
    rows = [{"reset_kwargs": each} for each in arguments]
    rows[0]["answer"], rows[1]["seed"] = "x", 3
    rollouts, _ = play(cls, "2", "2", "3", rows=rows)
    assert [rewards(rollout) for rollout in rollouts] == [[1.0, 0.0], [0.0, 1.0, 1.0], [0.0]]
    sent = [data for kind, data in counting.received if kind == "reset"]
    for arguments in ({"start": 1, "seed": 5}, {"start": 0, "seed": 3}, {"start": 0, "goal": 1}):
        assert arguments in sent
    assert len({id(rollout.environment) for rollout in rollouts}) == 3
    (rollout,), _ = play(load(counting), call("x"), "1", "2", "3", prompt="Begin.")
    assert rollout.prompt_messages[0]["content"] == "Begin.\nSay 1."
    assert rollout.turns[0].observation == "Say a number." and rewards(rollout) == [None, 1.0, 1.0, 1.0]
    env, received = load(counting)(), len(counting.received)
    reply = run_async(env.respond(rollout, Turn([], None, "1", "length")))
    assert (reply.messages, reply.reward) == (None, None) and len(counting.received) == received


class Columns(Count):
    def step(self, action):
        return {"board": [action["column"]], "winner": None}, 0.0, action["column"] == 3


def test_actions_of_numbers_are_written_as_json():
    with Served(Columns, COLUMNS) as served:
        (rollout,), _ = play(load(served), 'I go <action>{"column": 1}</action>', "two", '{"column": 3}')
    rules = f"Answer with <action>...</action>: JSON of {json.dumps(COLUMNS)}.\n"
    assert rollout.prompt_messages[0]["content"] == rules + "Say 1."
    assert [turn.info["action"] for turn in rollout.turns] == [{"column": 1}, None, {"column": 3}]
    assert [turn.observation for turn in rollout.turns[:2]] == [
        '{"board": [1]}', f"Error: Expecting value: line 1 column 1 (char 0)\n{rules.strip()}"
    ]  # fmt: skip


@pytest.mark.contract("OpenEnv")
def test_tools_of_the_server_are_the_models():
    """The rewards of a turn's calls are its reward. A call after the end of the episode is not made."""
    turns = [call("add", n=1), call("add", n=2) + "\n" + call("add", n=3), call("add", n=0), call("add", n=3),
             call("add", n=4) + "\n" + call("add", n=9)]  # fmt: skip
    with Served(Adds, CALLS, name="Adds") as served:
        (rollout,), _ = play(load(served), *turns, prompt="Reach ten.")
    tool = {"name": "add", "description": "Add to the sum.", "parameters": Adds.TOOL["input_schema"]}
    lines = TOKENIZER.decode(rollout.prompt_ids).splitlines()
    assert [json.loads(line)["function"] for line in lines if line.startswith('{"type": "function"')] == [tool]
    assert [[(result.text, result.error) for result in turn.results] for turn in rollout.turns] == [
        [("The sum is 1.", None)], [("The sum is 3.", None), ("The sum is 6.", None)],
        [("Error: it is nothing", "tool")], [("The sum is 9.\n[image: not shown]", None)],
        [("The sum is 13.", None), ("Error: the episode is over: this step was not taken", "tool")],
    ]  # fmt: skip
    assert rewards(rollout) == [0.5, 1.0, None, 0.5, 0.5] and rollout.reward == 2.5
    assert rollout.stop_reason == StopReason.ENVIRONMENT_STOP and rollout.environment.state == {"sum": 13}
    assert {turn.state_key for turn in rollout.turns} == {None}


def test_a_call_that_is_given_up_ends_the_session():
    """Its answer is not read as that of the next call, and there is no new session that nobody has reset."""
    begun, release = threading.Event(), threading.Event()

    class Slow(Adds):
        def step(self, action):
            if action.get("arguments") == {"n": 1}:
                begun.set()
                assert release.wait(60)
            return super().step(action)

    async def give_up(env):
        first = asyncio.create_task(env.add(n=1))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait([first])
        release.set()
        for request in (env.add(n=6), env.respond(mt.Rollout([], [], turns=[]), Turn([], None, "", "stop"))):
            with pytest.raises(EnvironmentFailure, match="step of .* failed .CancelledError"):
                await request

    with Served(Slow, CALLS) as served:
        cls = load(served)
        games = len(served.games)
        env = cls()
        run_async(env.reset())
        run_async(give_up(env))
        assert served.closed.wait(60) and len(served.games) == games + 1


def test_servers_that_are_full_and_those_that_cannot_be_used():
    with Served(Count, most=1) as one, Served(Count, most=1) as other:
        cls = load(one, other)
        assert cls.most_conversations == 2  # all others wait where no time limit counts
        rollouts, _ = play(cls, "1", "2", "3", rows=[{}] * 4)
        assert (one.most_open, other.most_open) == (1, 1)
    assert [rollout.reward for rollout in rollouts] == [3.0] * 4
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ValueError, match=f"^openenv_url: {url} does not answer"):
        load(url)
    with Served(Count) as served:
        for keys, args in (({}, {"tool_format": "xml"}), ({"tools_script": "tools/calculator.py"}, {})):
            with pytest.raises(ValueError, match=f"({min(args or keys)}).*no tools"):
                load(served, args=args, **keys)


NONSENSE = [
    "[" * 5000, '{"type": "observation"}', message(observation="Say 2.", done=False),
    message(observation={}, done="no"), '{"type": "observation", "data": {"observation": {}, "reward": NaN}}',
    '{"type": "error", "data": {"code": "SESSION_ERROR", "message": "out of memory"}}',
]  # fmt: skip


@pytest.mark.parametrize("answer", NONSENSE)
def test_a_server_that_fails_ends_its_rollout_alone(answer):
    """By name, also if a call noticed: a model does not go on from such an error."""

    class Odd(Count):
        def step(self, action):
            return answer if self.arguments.get("odd") else super().step(action)

    class OddTools(Adds):
        def step(self, action):
            return super().step(action) if action["type"] == "list_tools" else answer

    with Served(Odd) as served, Served(OddTools, CALLS) as tools:
        rollouts, _ = play(load(served), "1", "2", "3", rows=[{"reset_kwargs": {"odd": True}}, {}])
        rollouts += play(load(tools), call("add", n=1), "Enough.", prompt="Reach ten.")[0]
        assert served.closed.wait(60) and tools.closed.wait(60)
    assert rollouts[1].reward == 3.0
    for rollout, url in ((rollouts[0], served.url), (rollouts[2], tools.url)):
        assert rollout.stop_reason == StopReason.ENVIRONMENT_ERROR and rollout.failed and len(rollout.turns) == 1
        assert f"step of {url} failed" in str(rollout.error)


def test_a_step_that_raises_is_an_error_that_the_policy_reads(caplog):
    """Nothing has moved, and the episode goes on: a policy that has it raise is not rid of its rollout."""

    class Falls(Count):
        state = property(lambda self: 1 / 0)

        def step(self, action):
            if action["message"] == "fall":
                raise OSError("the board fell")
            return super().step(action)

    with Served(Falls) as served:
        (rollout,), _ = play(load(served), "1", "fall", "2", "3")
    assert rollout.turns[1].observation == "Error: the board fell" and rewards(rollout) == [1.0, None, 1.0, 1.0]
    assert rollout.error is None and rollout.reward == 3.0 and rollout.environment.state is None
    assert f"step of {served.url} raised on the server: the board fell" in caplog.text


def test_what_no_server_reads_is_no_failure_of_the_server(counting):
    """Otherwise a policy would be rid of a rollout by it."""
    deep = []
    for _ in range(100_000):
        deep = [deep]
    session, received = load(counting)().session, list(counting.received)
    for value in (deep, json.loads('"\\ud800"')):
        with pytest.raises(ActionRefused):
            run_async(session.ask("step", {"message": value}))
    assert counting.received == received and session.failure is None


REAL_SERVER = """
import sys, uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Adds(MCPEnvironment):
    def __init__(self):
        self.sum, mcp = 0, FastMCP("adds")
        @mcp.tool
        def add(n: int) -> str:
            self.sum += n
            return f"The sum is {self.sum}."

        super().__init__(mcp)

    reset, _step_impl = (lambda self, **kwargs: Observation()), None
    async def step_async(self, action, **kwargs):
        seen = await super().step_async(action, **kwargs)
        if isinstance(action, CallToolAction) and seen.error is None:
            seen.reward, seen.done = 0.5, self.sum >= 10
        return seen

    state = property(lambda self: State(sum=self.sum))


app = create_fastapi_app(Adds, CallToolAction, CallToolObservation)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@contextlib.contextmanager
def started(*command):
    """The address of a server that runs as a process, once it answers."""
    url = f"http://127.0.0.1:{free_port()}"
    process = subprocess.Popen([*map(str, command), url.rpartition(":")[2]], cwd=ROOT, env={"PATH": "/usr/bin:/bin"})
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=60):
                break
            threading.Event().wait(0.05)
        assert process.poll() is None
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.mark.contract_slow("OpenEnv")
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_real_server(tmp_path):
    """The sample, tools and numbers on openenv 0.10; and the sample's recipe trains two steps."""
    python = tmp_path / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "openenv==0.10.*"], check=True)
    with started(python, "tools/openenv/frozen_lake.py", "--port") as url:
        assert play_lake(url).environment.state == {"episode_id": "e", "step_count": 2, "place": [1, 1]}
        steps = trained("hf_recipes/tiny/openenv.yaml", tmp_path / "out", "--openenv_url", url, "--max_steps", 2)
        assert len(steps) == 2 and all(row["stop/environment_error"] == 0.0 for row in steps)
        assert all(row["rewards/FrozenLake/mean"] < 0.3 for row in steps)
    (tmp_path / "server.py").write_text(REAL_SERVER)
    with started(python, tmp_path / "server.py") as url:  # it has one session, and the second conversation waits
        turns = [call("add", n=1), call("add", n=2) + "\n" + call("add", n="x"), call("add", n=7)]
        rollouts, _ = play(load(url), *turns, rows=[{}] * 2, prompt="Reach ten.")
        for rollout in rollouts:
            assert rewards(rollout) == [0.5, 0.5, 0.5] and rollout.environment.state["sum"] == 10
            assert rollout.turns[0].results[0].text == "The sum is 1."
            assert "valid integer" in rollout.turns[1].results[1].text

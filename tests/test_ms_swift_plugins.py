"""ms-swift's example plug-ins: their rewards as they are, and all names that its example files import."""

import asyncio
import http.server
import inspect
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mt_grpo.adapters import swift_paths
from mt_grpo.adapters.ms_swift import ScheduledConversation
from mt_grpo.adapters.swift_recipe import as_reward, columns_of, completions_of
from mt_grpo.plugins import import_file
from mt_grpo.scoring import run_rewards

PLUGINS = Path(__file__).resolve().parents[1] / "../shared/data/plugins/ms_swift"
needs_plugins = pytest.mark.skipif(not PLUGINS.is_dir(), reason="ms-swift's example plug-ins are not there")
swift_paths.install()


def said(*texts):
    """Conversations that ended with these texts."""
    conversations = []
    for text in texts:
        conversation = ScheduledConversation()
        conversation.reset(prompt=[{"role": "user", "content": "What?"}])
        messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": text}]
        conversation.outputs = [{
            "messages": messages, "finish_reason": "stop", "is_truncated": False, "rollout_infos": {},
            "multi_turn_infos": {}, "response_token_ids": [[1]],
        }]  # fmt: skip
        conversations.append(conversation)
    return conversations


@pytest.fixture()
def services(monkeypatch):
    """A judge of code that accepts what is asked with the input 1, and a judge model that gives seven of ten."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({"object": "list", "data": [{"id": "judge", "object": "model", "created": 0, "owned_by": ""}]})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path.startswith("/submissions"):
                verdict = "Accepted" if asked["stdin"] == "1" and "print" in asked["source_code"] else "Wrong Answer"
                self.answer({"status": {"description": verdict}})
            else:
                score = "[[7]]" if "good" in asked["messages"][-1]["content"] else "[[0]]"
                self.answer({"choices": [{"message": {"content": f"Well: {score}"}}]})

        def answer(self, body):
            sent = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("JUDGE0_ENDPOINT", url)
    monkeypatch.setenv("GENRM_API_BASE", f"{url}/v1")
    yield
    server.shutdown()
    server.server_close()


CALL = '<tool_call>\n{"name": "f", "parameters": {"x": 1}}\n</tool_call>'
CODE = "<think>a</think><answer>```python\nprint(1)\n```</answer>"
TESTS = {"language": "python", "test_cases": [{"input": "1", "output": "1"}, {"input": "2", "output": "2"}]}
BY_HAND = {  # name -> (what was said, columns, rewards)
    "external_countdown": (
        ["<answer>(1+2)*3</answer>", "<answer>9</answer>"], {"target": [9, 9], "nums": [[1, 2, 3]] * 2}, [1.0, 0.0]),
    "external_r1v_acc": (
        [r"It is \boxed{1/2}", r"It is \boxed{1/3}"], {"solution": ["$0.5$", "$0.5$"]}, [1.0, 0.0]),
    "external_code_format": ([CODE, "print(1)"], {"verification_info": [TESTS] * 2}, [1.0, 0.0]),
    "external_code_reward_by_judge0": ([CODE, "print(1)"], {"verification_info": [TESTS] * 2}, [0.5, 0.0]),
    "async_genrm": (["good", "bad"], {}, [0.7, 0.0]),
    "external_tooluse_format_reward": (
        ["<think>a</think><response>b</response>", "b"], {"solution": ["<response>b</response>"] * 2}, [1.0, 0.0]),
    "external_tooluse_length_reward": (
        [f"<think>{'a ' * 256}</think>b", "b"], {"solution": ["b", "b"]}, [0.5, 0.0]),
    "external_tooluse_correct_reward": ([CALL, "b"], {"solution": [CALL, CALL]}, [3.0, -3.0]),
    "gsm8k_accuracy": (["3 + 4 is 7.\n#### 7", "8"], {"solution": ["so\n#### 7"] * 2}, [1.0, 0.0]),
    "gsm8k_format": (["3 + 4 is 7.\n#### 7", "8"], {}, [1.0, 0.0]),
    "thinking_tips": (["<answer>9</answer>", "<answer>8</answer>"], {"solution": ["9", "9"]}, [1.0, 0.0]),
}  # fmt: skip


@needs_plugins
@pytest.mark.parametrize("name", BY_HAND)
def test_every_example_reward_gives_what_it_gives_in_the_main_thread(name, services):
    """By hand, by the plug-in called here, and as the trainer calls it."""
    for file in ("plugin.py", "gsm8k_plugin.py"):
        import_file(str(PLUGINS / file), "external_plugins")
    texts, columns, right = BY_HAND[name]
    state, settings = SimpleNamespace(global_step=1), SimpleNamespace()
    conversations = said(*texts)
    for conversation, solution in zip(conversations, columns.get("solution", [])):
        conversation.row["solution"] = solution
    reward = swift_paths.registry("orms")[name](args=settings)
    here = reward(completions_of(conversations), **columns_of(conversations), **columns, trainer_state=state)
    here = asyncio.run(here) if inspect.isawaitable(here) else here
    given = {"prompts": [[], []], "environments": conversations, "trainer_state": state, **columns}
    (trained,) = run_rewards([as_reward(name, settings, settings)], given, 60.0, torch.device("cpu"))
    assert here == trained == right


@needs_plugins
def test_no_example_reward_is_left_out():
    """The sandbox of E2B is a service with a key: its reward says what it needs."""
    files = "".join((PLUGINS / file).read_text() for file in ("plugin.py", "gsm8k_plugin.py"))
    registered = {line.split("'")[1] for line in files.splitlines() if line.startswith("orms['")}
    assert registered - set(BY_HAND) == {"external_code_reward"}
    import_file(str(PLUGINS / "plugin.py"), "external_plugins")
    with pytest.raises(ValueError, match="reward_funcs: 'external_code_reward' raised AssertionError: The e2b"):
        as_reward("external_code_reward", SimpleNamespace(), SimpleNamespace())

"""An MCP server that npm brings: the reference server of everything, as users write it for `npx`."""

import json
import shutil
import subprocess

import psutil
import pytest
from processes import ends
from scripted import call
from test_mcp import talk, tools_of

from mt_grpo.conversation.tools.signature import tool_schema
from mt_grpo.integrations.mcp import servers as mcp_servers

pytestmark = pytest.mark.slow
EVERYTHING = "@modelcontextprotocol/server-everything@2026.8.31"
TOOLS = [
    "echo", "get-annotated-message", "get-env", "get-resource-links", "get-resource-reference",
    "get-structured-content", "get-sum", "get-tiny-image", "gzip-file-as-resource", "toggle-simulated-logging",
    "toggle-subscriber-updates", "trigger-long-running-operation", "simulate-research-query",
]  # fmt: skip


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The folder into which npm has installed it."""
    missing = [command for command in ("node", "npm", "npx") if shutil.which(command) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not there: this server needs Node.js")
    folder = tmp_path_factory.mktemp("npm")
    command = ["npm", "install", "--no-audit", "--no-fund", "--fetch-retries=1", "--prefix", str(folder), EVERYTHING]
    installed = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if installed.returncode:
        said = [line for line in installed.stderr.splitlines() if line.startswith("npm error")]
        pytest.skip(f"npm cannot install it: {' '.join(said[:3])}")
    return folder


@pytest.fixture(autouse=True)
def no_server_is_left():
    """Not even what `npx` has started: a shell, and node behind it."""
    before = set(psutil.Process().children(recursive=True))
    yield
    started = set(psutil.Process().children(recursive=True)) - before
    mcp_servers.close_servers()
    assert [process.pid for process in started if not ends(process.pid)] == []


def asked(tools):
    """What each call of a conversation with the server of everything gives."""
    turns = talk(
        tools, call("echo", message="über"), call("get-sum", a=2, b=3.5), call("get-sum", a="two", b=3),
        call("trigger-long-running-operation", duration=60, steps=2), call("echo", message="on"),
        call("get-tiny-image"), call("get-structured-content", location="Chicago"),
        call("get-resource-reference", resourceType="Blob"), call("get-resource-links", count=1), call("echo"),
        tool_timeout=3.0, max_completion_length=8000,
    )  # fmt: skip
    said = [(turn.error, turn.observation) for turn in turns]
    reference = said.pop(7)
    assert reference[0] is None and "\n[resource: not shown]\n" in reference[1]
    return said


SAID = [
    (None, "Echo: über"),
    (None, "The sum of 2 and 3.5 is 5.5."),
    (
        "tool",
        "Error: MCP error -32602: Input validation error: Invalid arguments for tool get-sum: Invalid input: expected "
        "number, received string at a",
    ),
    ("timeout", "Error: trigger-long-running-operation took longer than 3 s"),
    (None, "Echo: on"),
    (None, "Here's the image you requested:\n[image: not shown]\nThe image above is the MCP logo."),
    (None, '{"temperature":36,"conditions":"Light rain / drizzle","humidity":82}'),
    (None, "Here are 1 resource links to resources available in this server:\n[resource_link: not shown]"),
    ("call", "Error: missing a required argument: 'message'. Usage: echo(message: str) -> str | ResultInParts"),
]


def test_the_server_of_everything(packages, tmp_path, monkeypatch):
    """Over stdio; its variables are those that the entry gives, and no others of ours."""
    name = EVERYTHING.rpartition("@")[0]
    entry = {"command": "npx", "args": ["-y", name], "cwd": str(packages), "env": {"GIVEN": "yes"}}
    monkeypatch.setenv("MT_GRPO_TEST_SECRET", "secret")
    tools = tools_of(tmp_path, {"everything": entry})
    assert [tool.__name__ for tool in tools] == TOOLS
    message = {"type": "string", "description": "Message to echo"}
    assert tool_schema("echo", tools[0])["function"]["parameters"]["properties"] == {"message": message}
    assert asked(tools) == SAID
    (server,) = mcp_servers.servers_to_close
    assert server.starts == 1  # the call that took too long has not ended it
    (turn,) = talk(tools, call("get-env"), max_completion_length=40000, max_tool_response_tokens=30000)
    variables = json.loads(turn.results[0].text)
    assert variables["GIVEN"] == "yes" and "MT_GRPO_TEST_SECRET" not in variables

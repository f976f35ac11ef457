"""Tools of MCP servers: real ones over stdio and streamable HTTP; servers that die, hang, and say no."""

import json
import subprocess
import sys
import time

import psutil
import pytest
import vision_model
from processes import ends, wait_for_port
from scripted import ANSWER, CHATML_TOKENIZER, Scripted, call
from test_verl import free_port, settings

import mt_grpo_trainer as mt
from mt_grpo.conversation.tools.signature import tool_schema
from mt_grpo.images.pictures import pictures_in, readable
from mt_grpo.integrations.mcp import servers as mcp_servers
from mt_grpo.integrations.mcp.servers import close_servers, read_servers
from mt_grpo.recipe.plugins import load_recipe_tools

TIME = {"command": "python", "args": ["-m", "mcp_server_time", "--local-timezone=UTC"]}
SERVER = '''
"""Sums, sleeps, ends: over stdio, or on a port over streamable HTTP."""
import asyncio
import base64
import os
import sys
import time

from mcp.server.mcpserver import Image, MCPServer
from mcp.types import BlobResourceContents, CallToolResult, EmbeddedResource, ImageContent, TextContent
from pydantic import BaseModel

server = MCPServer("sums")


class Sum(BaseModel):
    total: int


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def end() -> str:
    """End the server."""
    os._exit(1)


@server.tool()
def variables() -> str:
    """Name the variables."""
    return " ".join(os.environ)


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("as it should")


@server.tool()
async def block() -> str:
    """Block the server."""
    time.sleep(3600)


@server.tool()
def odd() -> Sum:
    """Return a result outside of its schema."""
    return CallToolResult(content=[], structuredContent={"total": "many"})


@server.tool()
def draw() -> Image:
    """Draw."""
    return Image(data=b"x", format="png")


@server.tool()
def show(broken: bool = False):
    """Show."""
    with open(os.path.join(os.path.dirname(__file__), "image.png"), "rb") as file:
        data = base64.b64encode(file.read(30 if broken else -1)).decode()
    contents = [
        BlobResourceContents(uri="a://b", blob=data, mime_type="image/png"),
        BlobResourceContents(uri="a://c", blob=data, mime_type="application/zip"),
    ]
    return [
        TextContent(type="text", text="One:"),
        ImageContent(type="image", data=data, mime_type="image/png"),
        TextContent(type="text", text="Two:"),
        *(EmbeddedResource(type="resource", resource=each) for each in contents),
    ]


if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run("stdio")
'''


@pytest.fixture(autouse=True)
def servers_end():
    """No test leaves a server behind."""
    yield
    started = [server.owner for server in mcp_servers.servers_to_close if server.owner is not None]
    close_servers()
    until = time.monotonic() + 60  # one that was cancelled ends a moment later
    while not all(owner.done() for owner in started) and time.monotonic() < until:
        time.sleep(0.02)
    assert all(owner.done() for owner in started)


def sums(folder, *arguments):
    (folder / "sums.py").write_text(SERVER)
    (folder / "image.png").write_bytes(vision_model.as_bytes(vision_model.picture(5)))
    return {"command": sys.executable, "args": [str(folder / "sums.py"), *arguments]}


def tools_of(folder, entries, **keys):
    path = folder / "servers.json"
    path.write_text(json.dumps({"mcpServers": entries}))
    return load_recipe_tools(settings(mcp_config_file=str(path), **keys))


def talk(tools, *calls, **more):
    """The turns of one conversation with these calls, one a turn."""
    env = mt.MultiTurnToolEnv(tools, None, len(calls), tokenizer=CHATML_TOKENIZER,
                              **{"max_completion_length": 4000, **more})  # fmt: skip
    (rollout,) = env.generate(["?"], Scripted([[*calls, ANSWER]]))["rollouts"]
    return rollout.turns[:-1]


@pytest.mark.contract("MCP")
def test_the_time_server(tmp_path):
    """mcp-server-time over stdio: what it says of itself, its answers and its errors are what the model reads."""
    tools = tools_of(tmp_path, {"time": TIME})
    assert [tool.__name__ for tool in tools] == ["get_current_time", "convert_time"]
    function = tool_schema("convert_time", tools[1])["function"]
    assert function["parameters"]["required"] == ["source_timezone", "time", "target_timezone"]
    arguments = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    good, wrong, unknown = talk(tools, call("convert_time", **arguments),
                                call("convert_time", **{**arguments, "time": "noon"}),
                                call("convert_time", zone="UTC"))  # fmt: skip
    assert json.loads(good.results[0].text)["target"]["datetime"].endswith("T21:00:00+09:00")
    assert wrong.error == "tool" and "Invalid time format" in wrong.observation
    assert unknown.error == "call"  # before the server is asked


@pytest.mark.contract("MCP")
@pytest.mark.parametrize("transport, path, more", [
    ("streamable-http", "mcp", {"headers": {"Authorization": "Bearer ${TOKEN_X}"}}),
    ("sse", "sse", {"auth_token": "${TOKEN_X}"}),
])  # fmt: skip
def test_a_server_on_a_port(tmp_path, monkeypatch, transport, path, more):
    """It goes away, and comes back. `auth_token` is verl's, of the older transport."""
    monkeypatch.setenv("TOKEN_X", "secret")
    port, processes, given = free_port(), [], []
    entry = sums(tmp_path, str(port))
    (tmp_path / "sums.py").write_text(SERVER.replace("streamable-http", transport))
    connect = mcp_servers.sse_client
    monkeypatch.setattr(mcp_servers, "sse_client", lambda url, **keys: given.append(keys) or connect(url, **keys))

    def start():
        processes.append(subprocess.Popen([entry["command"], *entry["args"]], stderr=subprocess.DEVNULL))
        wait_for_port(port)

    def stop():
        processes[-1].terminate()
        processes[-1].wait(timeout=30)

    try:
        start()
        tools = tools_of(tmp_path, {"sums": {"url": f"http://127.0.0.1:{port}/{path}", **more}})
        (turn,) = talk(tools, call("add", a=3))
        assert (turn.observation, turn.error) == ("4", None)
        stop()
        (turn,) = talk(tools, call("add", a=3))
        assert turn.error == "tool" and "the server sums" in turn.observation and "secret" not in turn.observation
        start()
        turns = talk(tools, call("add", a=4), call("add", a=4))  # the first may notice that its session is gone
        assert (turns[-1].observation, turns[-1].error) == ("5", None)
        if "auth_token" in more:
            assert {keys["headers"]["Authorization"] for keys in given} == {"Bearer secret"}
            entry = {"url": f"http://127.0.0.1:{port}/{path}", "type": "sse"}
            assert talk(tools_of(tmp_path, {"sums": entry}), call("add", a=5))[0].observation == "6"
    finally:
        stop()


@pytest.mark.contract("MCP")
def test_a_server_that_dies_is_started_again_and_nothing_else_ends_it(tmp_path, monkeypatch, caplog):
    """The call that notices it reads an error; a failure of the tool's own and a call that hangs end no server.

    Half a character would end the connection of all conversations; an infinity would arrive as null. Its variables are
    those of its entry, and no others of ours.
    """
    monkeypatch.setenv("MT_GRPO_TEST_SECRET", "secret")
    tools = tools_of(tmp_path, {"sums": sums(tmp_path) | {"env": {"GIVEN": "yes"}}})
    (turn,) = talk(tools, call("variables"))
    assert "GIVEN" in turn.observation.split() and "MT_GRPO_TEST_SECRET" not in turn.observation
    texts = ['{"a": "\\ud800"}', '{"a": 1e400}', '{"a": [NaN]}', '{"a": 1}']
    *refused, added = talk(tools, *(f'<tool>{{"name": "add", "args": {text}}}</tool>' for text in texts))
    assert added.observation == "2"
    for turn in refused:
        assert turn.error == "tool" and "the call holds half a character" in turn.observation
    hangs, after = talk(tools, call("wait", seconds=3600), call("add", a=1), tool_timeout=2.0)
    assert hangs.error == "timeout" and (after.observation, after.error) == ("2", None)
    assert not [record for record in caplog.records if "restarted" in record.message]
    calls = [call("end"), call("add", a=1), call("fail"), call("add", a="x"), call("odd"), call("draw")]
    died, again, failed, typed, odd, drawn = talk(tools, *calls)
    assert odd.error == "tool" and "was lost" not in odd.observation
    assert died.error == "tool" and "the server sums was lost during the call. Try again." in died.observation
    assert (again.observation, again.error) == ("2", None)
    assert failed.error == "tool" and "Error executing tool fail" in failed.observation
    assert typed.error == "tool" and "int" in typed.observation
    assert drawn.observation == "[image: not shown]"
    assert [record.message for record in caplog.records if "restarted" in record.message] == [
        "The MCP server sums had ended and is restarted."
    ]


@pytest.mark.contract("MCP")
def test_images_are_read_where_the_model_reads_images(tmp_path):
    """Each at its place between the texts. A model of text reads their names, and so is read what is no image."""
    tools = tools_of(tmp_path, {"sums": sums(tmp_path)})
    named = "One:\n[image: not shown]\nTwo:\n[resource: not shown]\n[resource: not shown]"
    assert [turn.observation for turn in talk(tools, call("show"))] == [named]
    tokenizer = vision_model.reading(vision_model.save(tmp_path / "model"))
    picture = tokenizer.pictures.read(vision_model.picture(5), "")
    env = mt.MultiTurnToolEnv(tools, None, 4, tokenizer=tokenizer, max_completion_length=600)
    turns = [call("show"), call("show", broken=True), call("draw"), ANSWER]
    script = [tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in turns]
    with vision_model.read_off_the_loop(tokenizer):
        (rollout,) = env.generate(["?"], Scripted([script]))["rollouts"]
    shown, broken, drawn, _ = rollout.turns
    name = f"<image {picture.name}>"
    assert readable(shown.observation) == f"One:\n{name}\nTwo:\n{name}\n[resource: not shown]"
    assert pictures_in(shown.observation_ids) == [picture, picture] and shown.error is None
    why = "\nthe tool's result: the image cannot be read: "
    assert broken.observation.startswith(named + why) and broken.error is None
    assert drawn.observation.startswith("[image: not shown]" + why) and not pictures_in(drawn.observation_ids)


def test_a_start_goes_on_where_its_call_is_given_up(tmp_path):
    """The next call waits for the same start: one server, however long it takes."""
    tools = tools_of(tmp_path, {"sums": sums(tmp_path)})
    (server,) = mcp_servers.servers_to_close
    source = (tmp_path / "sums.py").read_text()
    (tmp_path / "sums.py").write_text("import time\ntime.sleep(2)\n" + source)
    talk(tools, call("end"))
    calls = talk(tools, *[call("add", a=1)] * 12, tool_timeout=1.0)
    assert calls[0].error == "timeout" and calls[-1].observation == "2" and server.starts == 2


def test_a_server_that_hangs_is_started_again(tmp_path, monkeypatch):
    tools = tools_of(tmp_path, {"sums": sums(tmp_path)})
    (server,) = mcp_servers.servers_to_close
    (hung,) = [each.pid for each in psutil.Process().children() if f"{tmp_path}/sums.py" in each.cmdline()]
    monkeypatch.setattr(mcp_servers, "SECONDS_TO_ANSWER", 3.0)
    blocked, *_, after = talk(tools, call("block"), *[call("add", a=1)] * 40, tool_timeout=2.0)
    assert (blocked.error, after.observation, after.error, server.starts) == ("timeout", "2", None, 2) and ends(hung)


@pytest.mark.contract("MCP")
def test_a_file_is_read(tmp_path, monkeypatch):
    """With variables of the environment, whose values may hold any character."""
    monkeypatch.setenv("TOKEN_X", 'pa"$\\word')
    entries = {
        "a": {"command": "x", "args": ["$1", "${NOT_SET_X:-0}"], "env": {"K": "${TOKEN_X}"}, "cwd": "/tmp"},
        "b": {"type": "http", "url": "${NOT_SET_X:-http://x}/mcp", "headers": {"A": "Bearer ${TOKEN_X}"}},
    }
    path = tmp_path / "servers.json"
    path.write_text(json.dumps({"mcpServers": entries}))
    assert read_servers(str(path), "mcp_config_file") == {
        "a": {"command": "x", "args": ["$1", "0"], "env": {"K": 'pa"$\\word'}, "cwd": "/tmp"},
        "b": {"type": "http", "url": "http://x/mcp", "headers": {"A": 'Bearer pa"$\\word'}},
    }


LISTS = """
import json, sys

tools = json.loads(sys.argv[1])
for line in sys.stdin:
    asked = json.loads(line)
    answer = {"error": {"code": -32601, "message": "no such method"}}
    if asked["method"] == "initialize":
        answer = {"result": {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                             "serverInfo": {"name": "lists", "version": "1"}}}
    elif asked["method"] == "tools/list":
        page = int(asked.get("params", {}).get("cursor", 0))
        more = {"nextCursor": str(page + 1)} if page + 1 < len(tools) else {}
        answer = {"result": {"tools": tools[page : page + 1], **more}}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""


def test_lists_of_tools_have_pages_and_no_name_twice(tmp_path):
    def listing(*names):
        listed = [{"name": name, "inputSchema": {"type": "object", "properties": {"x": True}}} for name in names]
        return {"command": sys.executable, "args": ["-S", str(tmp_path / "lists.py"), json.dumps(listed)]}

    (tmp_path / "lists.py").write_text(LISTS)
    (tool,) = tools_of(tmp_path, {"twice": listing("add", "sub", "add") | {"tools": ["sub"]}})
    assert tool_schema("sub", tool)["function"] == {  # `true` is JSON schema's word for any value
        "name": "sub", "description": "sub of twice.", "parameters": {"type": "object", "properties": {"x": True}}
    }  # fmt: skip
    with pytest.raises(ValueError, match="offers no tool 'sub'"):
        tools_of(tmp_path, {"a": listing("add") | {"tools": ["add", "sub"]}})
    with pytest.raises(ValueError, match="offer no tools"):
        tools_of(tmp_path, {"none": listing()})
    two = {"a": listing("add", "draw"), "b": listing("add", "show")}
    with pytest.raises(ValueError, match="Two tools are called 'add'"):
        mt.MultiTurnToolEnv(tools_of(tmp_path, two))
    selected = {"a": two["a"] | {"tools": ["draw"]}, "b": two["b"] | {"tools": ["show", "add"]}}
    assert {tool.__name__ for tool in tools_of(tmp_path, selected)} == {"draw", "show", "add"}


BAD_FILES = {
    "a key of another program": ('{"mcpServers": {"a": {"command": "x", "envFile": ".env"}}}', "command, envFile"),
    "a variable that is not set": ('{"mcpServers": {"a": {"command": "${NOT_SET_X}"}}}', "NOT_SET_X.*must be set"),
    "nobody there": ('{"mcpServers": {"a": {"url": "http://127.0.0.1:9/mcp"}}}', "running at http://127.0.0.1:9/mcp"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused(tmp_path, name):
    text, message = BAD_FILES[name]
    (tmp_path / "servers.json").write_text(text)
    with pytest.raises(ValueError, match="mcp_config_file: .*" + message):
        load_recipe_tools(settings(mcp_config_file=str(tmp_path / "servers.json")))

"""Tools of MCP servers: real ones over stdio and streamable HTTP; servers that die, hang, and say no."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import types

import psutil
import pytest
import vision_model
import warm_python
from processes import IMPORTS, ends
from scripted import CHATML_TOKENIZER, Scripted, call
from test_environments import ANSWER
from test_verl import build, converse, free_port, settings, write_yaml

import mt_grpo_trainer as mt
from mt_grpo.base.event_loop import background_loop
from mt_grpo.base.pictures import pictures_in
from mt_grpo.conversation.pictures import readable
from mt_grpo.conversation.tools.signature import tool_schema
from mt_grpo.integrations.mcp import servers as mcp_servers
from mt_grpo.integrations.mcp.files import fill_all, read_servers
from mt_grpo.integrations.mcp.servers import LOOP, close_servers
from mt_grpo.recipe.integrations import load_integration_tools

TIME = {"command": "python", "args": ["-m", "mcp_server_time", "--local-timezone=UTC"]}
SERVER = '''
"""Sums, sleeps, ends: over stdio, or on a port over streamable HTTP."""
import asyncio
import base64
import functools
import os
import sys
from typing import Annotated

from mcp.server.mcpserver import Image, MCPServer
from mcp.types import BlobResourceContents, EmbeddedResource, ImageContent, TextContent
from pydantic import Field

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


def described(start: Annotated[int, Field(alias="from")], to: int = 9) -> str:
    """A span."""


@server.tool(name="span")
@functools.wraps(described)
def span(**arguments):
    return f"{arguments['from']} to {arguments.get('to', 9)}"


@server.tool()
def end() -> str:
    """End the server."""
    os._exit(1)


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("as it should")


@server.tool()
def draw() -> Image:
    """Draw."""
    return Image(data=b"x", format="png")


@server.tool()
def show(seed: int = 0, broken: bool = False):
    """Show."""
    import io
    import random
    from PIL import Image as PilImage
    pixels, file = random.Random(seed), io.BytesIO()
    image = PilImage.new("RGB", (4, 4))
    image.putdata([tuple(pixels.randrange(256) for _ in range(3)) for _ in range(16)])
    image.resize((56, 56), PilImage.Resampling.NEAREST).save(file, "PNG")
    data = base64.b64encode(file.getvalue()[: 30 if broken else None]).decode()
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
    started = [server.owner for server in mcp_servers.servers_to_close]
    close_servers()
    assert all(owner is None or owner.done() for owner in started)


def sums(folder, *arguments):
    (folder / "sums.py").write_text(SERVER)
    return {"command": sys.executable, "args": [str(folder / "sums.py"), *arguments]}


def tools_of(folder, entries, **keys):
    path = folder / "servers.json"
    path.write_text(json.dumps({"mcpServers": entries}))
    return load_integration_tools(settings(mcp_config_file=str(path), **keys))


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


def test_the_git_server(tmp_path):
    """mcp-server-git, two servers in one file, tools by selection."""
    for command in (["init", "-q"], ["-c", "user.name=A", "-c", "user.email=a@b", "commit", "-q", "--allow-empty",
                                     "-m", "First"]):  # fmt: skip
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    git = {"command": sys.executable, "args": ["-m", "mcp_server_git", "--repository", str(tmp_path)]}
    tools = tools_of(tmp_path, {"git": git, "time": TIME}, mcp_tools=["git_log", "time:get_current_time"])
    assert [tool.__name__ for tool in tools] == ["git_log", "get_current_time"]
    (turn,) = talk(tools, call("git_log", repo_path=str(tmp_path)))
    assert "First" in turn.observation and turn.error is None


@pytest.mark.contract("MCP")
def test_a_server_over_streamable_http(tmp_path):
    port = free_port()
    entry = sums(tmp_path, str(port))
    process = subprocess.Popen([entry["command"], *entry["args"]], stderr=subprocess.DEVNULL)
    try:
        wait_for(port)
        tools = tools_of(tmp_path, {"sums": {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"X-A": "$HOME"}}})
        (turn,) = talk(tools, call("add", a=3))
        assert (turn.observation, turn.error) == ("4", None)
        process.terminate()
        process.wait(timeout=30)
        (turn,) = talk(tools, call("add", a=3))
        assert turn.error == "tool" and "sums" in turn.observation
        process = subprocess.Popen([entry["command"], *entry["args"]], stderr=subprocess.DEVNULL)
        wait_for(port)
        (turn,) = talk(tools, call("add", a=4))
        assert (turn.observation, turn.error) == ("5", None)
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.mark.parametrize("more", [{}, {"type": "sse"}])
def test_a_server_of_the_older_transport(tmp_path, monkeypatch, more):
    """In the form of verl's JSON, whose addresses with `auth_token` are of it without saying so."""
    port, given = free_port(), []
    entry = sums(tmp_path, str(port))
    (tmp_path / "sums.py").write_text(SERVER.replace('"streamable-http"', '"sse"'))
    connect = mcp_servers.sse_client
    monkeypatch.setattr(mcp_servers, "sse_client", lambda url, **keys: given.append(keys) or connect(url, **keys))
    process = subprocess.Popen([entry["command"], *entry["args"]], stderr=subprocess.DEVNULL)
    try:
        wait_for(port)
        url = f"http://127.0.0.1:{port}/sse"
        tools = tools_of(tmp_path, {"sums": {"url": url, "auth_token": "secret", **more}})
        (turn,) = talk(tools, call("add", a=3))
        assert (turn.observation, turn.error) == ("4", None)
        process.terminate()
        process.wait(timeout=30)
        (turn,) = talk(tools, call("add", a=3))
        assert turn.error == "tool" and "sums" in turn.observation
        process = subprocess.Popen([entry["command"], *entry["args"]], stderr=subprocess.DEVNULL)
        wait_for(port)
        (turn,) = talk(tools, call("add", a=4))
        assert (turn.observation, turn.error) == ("5", None)
        assert {keys["headers"]["Authorization"] for keys in given} == {"Bearer secret"}
        assert {keys["sse_read_timeout"] for keys in given} == {None}  # no call for long ends nothing
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_for(port):
    for _ in range(300):
        with socket.socket() as caller:
            if caller.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("no server")


def test_what_json_cannot_hold_is_refused_and_ends_no_server(tmp_path, caplog):
    """Half a character would end the connection of all conversations; an infinity would arrive as null."""
    tools = tools_of(tmp_path, {"sums": sums(tmp_path)})
    texts = ['{"a": "\\ud800"}', '{"a": 1e400}', '{"a": [NaN]}', '{"a": 1}']
    *refused, added = talk(tools, *(f'<tool>{{"name": "add", "args": {text}}}</tool>' for text in texts))
    assert added.observation == "2"
    for turn in refused:
        assert turn.error == "tool" and "the call holds half a character, or a number that JSON has not" in (
            turn.observation
        )
    assert not [record for record in caplog.records if "restarted" in record.message]


@pytest.mark.contract("MCP")
def test_a_server_that_dies_is_started_again(tmp_path, caplog):
    """The call that notices it reads an error; a failure of the tool's own ends no server."""
    tools = tools_of(tmp_path, {"sums": sums(tmp_path)})
    died, again, failed, typed, drawn, span, unnamed = talk(
        tools, call("end"), call("add", a=1), call("fail"), call("add", a="x"), call("draw"),
        call("span", **{"from": 3}), call("span", to=3),
    )  # fmt: skip
    assert died.error == "tool" and "the server sums ended during the call. Try again." in died.observation
    assert (again.observation, again.error) == ("2", None)
    assert failed.error == "tool" and "Error executing tool fail" in failed.observation
    assert typed.error == "tool" and "int" in typed.observation
    assert drawn.observation == "[image: not shown]"
    assert span.observation == "3 to 9"  # a name that Python does not take as a parameter's
    assert unnamed.observation.startswith("Error: missing a required argument: 'from'. Usage: span(to: int = 9, **oth")
    assert [record.message for record in caplog.records if "restarted" in record.message] == [
        "The MCP server sums had ended and is restarted."
    ]


@pytest.mark.contract("MCP")
def test_images_are_read_where_the_model_reads_images(tmp_path):
    """Each at its place between the texts. A model of text reads their names, and so is read what is no image."""
    tools = tools_of(tmp_path, {"sums": sums(tmp_path)}, max_tool_response_length=200)
    named = "One:\n[image: not shown]\nTwo:\n[resource: not shown]\n[resource: not shown]"
    assert [turn.observation for turn in talk(tools, call("show"))] == [named]
    tokenizer = vision_model.reading(vision_model.save(tmp_path / "model"))
    picture = tokenizer.pictures.read(vision_model.picture(5), "")
    env = mt.MultiTurnToolEnv(tools, None, 4, tokenizer=tokenizer, max_completion_length=600)
    turns = [call("show", seed=5), call("show", broken=True), call("draw"), ANSWER]
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
    (tmp_path / "sums.py").write_text("import time\ntime.sleep(4)\n" + source)
    talk(tools, call("end"))
    calls = talk(tools, *[call("add", a=1)] * 12, tool_timeout=1.0)
    assert calls[0].error == "timeout" and calls[-1].observation == "2" and server.starts == 2


def test_a_session_that_is_lost_is_opened_again(tmp_path, caplog):
    """A server that was restarted between two calls knows no session of before."""
    port = free_port()
    entry = sums(tmp_path, str(port))
    processes = []

    def start():
        processes.append(subprocess.Popen([entry["command"], *entry["args"]], stderr=subprocess.DEVNULL))
        wait_for(port)

    try:
        start()
        tools = tools_of(tmp_path, {"sums": {"url": f"http://127.0.0.1:{port}/mcp"}})
        processes[0].terminate()
        processes[0].wait(timeout=30)
        start()
        turns = talk(tools, call("add", a=1), call("add", a=2))
        assert turns[-1].observation == "3"
    finally:
        for process in processes:
            process.terminate()
            process.wait(timeout=30)


def test_a_slow_call_ends_no_server(tmp_path):
    """Neither its own, past the time in which a server has to start, nor one that another call waits for."""
    tools = tools_of(tmp_path, {"sums": sums(tmp_path)}, mcp_start_timeout=8.0)
    (server,) = mcp_servers.servers_to_close
    env = mt.MultiTurnToolEnv(tools, None, 1, tokenizer=CHATML_TOKENIZER, tool_timeout=30.0)
    scripts = [[call("wait", seconds=9), ANSWER], [call("fail"), ANSWER]]
    slow, failed = env.generate(["?"] * 2, Scripted(scripts))["rollouts"]
    assert slow.turns[0].observation == "waited" and failed.turns[0].error == "tool" and server.starts == 1


def test_variables_must_be_set(tmp_path, monkeypatch):
    monkeypatch.setenv("WITH_DOLLAR", "pa$word")
    values = fill_all({"A": "Bearer ${WITH_DOLLAR}", "B": 1}, "sums", "env", {})
    assert values == {"A": "Bearer pa$word", "B": "1"}
    with pytest.raises(ValueError, match="A has \\$NOT_SET_X, an environment variable that is not set"):
        tools_of(tmp_path, {"sums": {**sums(tmp_path), "env": {"A": "$NOT_SET_X"}}})


def test_a_call_that_hangs_is_told_and_holds_up_nothing(tmp_path):
    tools = tools_of(tmp_path, {"sums": sums(tmp_path)}, mcp_max_concurrent_calls=1)
    hangs, after = talk(tools, call("wait", seconds=3600), call("add", a=1), tool_timeout=2.0)
    assert hangs.error == "timeout" and (after.observation, after.error) == ("2", None)


def test_calls_at_the_same_time(tmp_path):
    """Eight conversations whose calls overlap, over one connection."""
    tools = tools_of(tmp_path, {"sums": sums(tmp_path)})
    env = mt.MultiTurnToolEnv(tools, None, 1, tokenizer=CHATML_TOKENIZER)
    scripts = [[call("add", a=number), ANSWER] for number in range(8)]
    rollouts = env.generate(["?"] * 8, Scripted(scripts))["rollouts"]
    assert [rollout.turns[0].observation for rollout in rollouts] == [str(number + 1) for number in range(8)]


@pytest.mark.parametrize("limits", [dict(concurrency=2), dict(concurrency=6, rate_limit=10.0)])
def test_limits_of_calls(limits):
    """At most so many at the same time, and at most so many per second."""
    server = mcp_servers.McpServer("x", {"command": "x"}, 1.0, **limits)
    running, most, begun = 0, 0, []

    class Client:
        async def call_tool(self, tool, arguments):
            nonlocal running, most
            running, most = running + 1, max(most, running + 1)
            begun.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.05)
            running -= 1

    async def run():
        server.owner, server.ready = asyncio.ensure_future(asyncio.sleep(60)), asyncio.Future()
        server.deadline = asyncio.get_running_loop().time() + 60
        server.ready.set_result(Client())
        await asyncio.gather(*(server.call("x", {}) for _ in range(6)))
        server.owner.cancel()

    asyncio.run(run())
    if "rate_limit" in limits:
        assert begun[-1] - begun[0] >= 5 * 0.1 - 0.01
    else:
        assert most == 2


BAD_FILES = {
    "no json": ("{", "is not JSON"),
    "no servers": ("{}", 'has no "mcpServers", or "servers" as in VS Code'),
    "a name twice": ('{"mcpServers": {"a": {"command": "x"}, "a": {}}}', "the key 'a' is set twice. Remove one"),
    "an entry that is none": ('{"mcpServers": {"a": "x"}}', "is 'x', expected an object with command or url"),
    "a login": ('{"mcpServers": {"a": {"url": "http://x", "oauth": {}}}}', "an interactive login. Set headers"),
    "tools that are none": ('{"mcpServers": {"a": {"command": "x", "includeTools": "add"}}}', "a list of names"),
    "text for true": ('{"mcpServers": {"a": {"command": "x", "disabled": "false"}}}', "disabled is 'false'"),
    "an input": ('{"servers": {"a": {"command": "x", "args": ["${input:k}"]}}}', "VS Code asks a person"),
    "no text": ('{"mcpServers": {"a": {"command": 3}}}', "command is 3, expected text"),
    "no env file": ('{"mcpServers": {"a": {"command": "x", "envFile": "/no"}}}', "envFile '/no' cannot be read: "),
    "no target": ('{"mcpServers": {"a": {}}}', "neither or both of command and url"),
    "an unknown key": ('{"mcpServers": {"a": {"command": "x", "arg": []}}}', "has the keys \\['arg'\\]"),
    "an unknown type": ('{"mcpServers": {"a": {"url": "http://x", "type": "ws"}}}', "has the type 'ws'"),
    "no command": ('{"mcpServers": {"a": {"command": "/not/there"}}}', "FileNotFoundError"),
    "one that ends": ('{"mcpServers": {"a": {"command": "false", "args": ["a b"]}}}', "exit code 1 .*`false 'a b'`"),
    "one that is killed": (
        '{"mcpServers": {"a": {"command": "sh", "args": ["-c", "read line; kill -9 $$"]}}}',
        "ended by SIGKILL",
    ),
    "one that hangs": ('{"mcpServers": {"a": {"command": "sleep", "args": ["99"]}}}', "no answer in 1 s"),
    "nobody there": (
        '{"mcpServers": {"a": {"url": "http://127.0.0.1:9/mcp"}}}',
        "Is it running at http://127.0.0.1:9/mcp",
    ),
    "nobody there, with a key": (
        '{"mcpServers": {"a": {"url": "http://127.0.0.1:9/mcp?key=${HOME}"}}}',
        r"Is it running at http://127.0.0.1:9/mcp\?key=\$\{HOME\}\?$",
    ),
    "all disabled": ('{"mcpServers": {"a": {"command": "false", "disabled": true}}}', "offer no tools"),
}


PAGES = """
import itertools, json, sys

for number, line in enumerate(sys.stdin):
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answer = {"error": {"code": -32601, "message": "no such method"}}
    if asked["method"] == "initialize":
        answer = {"result": {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                             "serverInfo": {"name": "pages", "version": "1"}}}
    elif asked["method"] == "tools/list":
        cursor = "again" if sys.argv[1] == "same" else str(number)
        answer = {"result": {"tools": [], "nextCursor": cursor}}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""


LISTS = """
import json, sys

tools = json.loads(sys.argv[1])
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answer = {"error": {"code": -32601, "message": "no such method"}}
    if asked["method"] == "initialize":
        answer = {"result": {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                             "serverInfo": {"name": "lists", "version": "1"}}}
    elif asked["method"] == "tools/list":
        answer = {"result": {"tools": tools}}
    elif asked["method"] == "tools/call":
        text = json.dumps(asked["params"]["arguments"], sort_keys=True)
        answer = {"result": {"content": [{"type": "text", "text": text}]}}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""


def listing(tmp_path, *tools):
    """The entry of a server that offers these tools, each (name, properties), and answers with a call's arguments."""
    (tmp_path / "lists.py").write_text(LISTS)
    listed = [{"name": name, "description": "Takes all.", "inputSchema": {"type": "object", "properties": properties}}
              for name, properties in tools]  # fmt: skip
    return {"command": sys.executable, "args": ["-S", str(tmp_path / "lists.py"), json.dumps(listed)]}


def test_two_tools_of_one_name_in_one_server_are_refused(tmp_path):
    """Also where only one other tool is selected: a call says no more than the name."""
    entry = listing(tmp_path, ("add", {}), ("sub", {}), ("add", {"a": {"type": "integer"}}))
    message = "the server 'twice' .*two tools called 'add'"
    for keys in ({}, {"mcp_tools": ["sub"]}):
        with pytest.raises(ValueError, match=message):
            tools_of(tmp_path, {"twice": entry}, **keys)


def test_a_property_whose_schema_is_true_takes_every_value(tmp_path):
    """JSON schema's word for it. The model reads it as it is."""
    tools = tools_of(tmp_path, {"any": listing(tmp_path, ("take", {"x": True, "n": {"type": "integer"}}))})
    assert tool_schema("take", tools[0])["function"]["parameters"]["properties"]["x"] is True
    for value in (1, "text", [1, {"a": None}], {"b": 2.5}, None):
        (turn, *_) = talk(tools, call("take", x=value, n=3))
        assert json.loads(turn.observation) == {"n": 3, "x": value}, turn.observation


@pytest.mark.parametrize("cursor, message", [
    ("same", "nextCursor 'again' twice"),
    ("new", "tools/list (did not end in 10 s: it gave 0 tools on|has more than 20 pages)"),
])  # fmt: skip
def test_a_list_of_tools_that_never_ends_is_refused(tmp_path, monkeypatch, cursor, message):
    monkeypatch.setattr(mcp_servers, "MOST_PAGES", 20)
    (tmp_path / "pages.py").write_text(PAGES)
    entry = {"command": sys.executable, "args": ["-S", str(tmp_path / "pages.py"), cursor]}
    with pytest.raises(ValueError, match="mcp_config_file: the server 'pages' of .* does not start: .*" + message):
        tools_of(tmp_path, {"pages": entry}, mcp_start_timeout=10.0)


def test_a_list_of_tools_has_one_time_for_all_its_pages():
    """Each page in time, and the list not: the limit is the list's."""
    server = mcp_servers.McpServer("x", {"command": "x"}, 0.1, 1)
    asked = []

    class Client:
        async def list_tools(self, cursor):
            asked.append(cursor)
            await asyncio.sleep(0.02)
            return types.SimpleNamespace(tools=["tool"], next_cursor=str(len(asked)))

    async def connected():
        return Client()

    server.connected = connected
    with pytest.raises(TimeoutError, match=r"tools/list did not end .* (\d+) tools on \1 pages"):
        asyncio.run(server.tools())
    assert asked == [None, *map(str, range(1, len(asked)))]  # however many a busy machine has time for


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused(tmp_path, name):
    text, message = BAD_FILES[name]
    (tmp_path / "servers.json").write_text(text)
    limit = 1.0 if "no answer in 1 s" in message else 60.0  # the others say so by themselves, however long it takes
    with pytest.raises(ValueError, match="mcp_config_file: .*" + message):
        load_integration_tools(settings(mcp_config_file=str(tmp_path / "servers.json"), mcp_start_timeout=limit))


def test_a_server_that_says_what_is_none_is_told_by_field(tmp_path):
    """Not by pydantic's first line, which says how many fields are wrong."""
    server = tmp_path / "odd.py"
    server.write_text(ODD)
    with pytest.raises(ValueError, match="InitializeResult .*capabilities: Field required"):
        tools_of(tmp_path, {"odd": {"command": sys.executable, "args": [str(server)]}})


ODD = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        result = {"protocolVersion": "2025-06-18"}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


def read(tmp_path, text):
    (tmp_path / "servers.json").write_text(text if isinstance(text, str) else json.dumps(text))
    return read_servers(str(tmp_path / "servers.json"), "mcp_config_file")


def test_files_of_other_clients_are_read(tmp_path, monkeypatch, caplog):
    """Each as its client's documentation has it; the expected values by hand."""
    monkeypatch.setenv("TOKEN_X", "t")
    monkeypatch.chdir(tmp_path)
    target = {"url": "http://x/mcp", "headers": {"A": "Bearer ${TOKEN_X}"}}
    claude_code = {**target, "type": "http", "url": "${BASE_X:-http://x}/mcp"}
    cursor = {"type": "stdio", "command": "${userHome}/a", "args": ["${workspaceFolder}/b", "$1"],
              "env": {"K": "${env:TOKEN_X}"}}  # fmt: skip
    cline = {**target, "type": "streamableHttp", "autoApprove": ["a"], "alwaysAllow": [], "disabled": False}
    windsurf = {"serverUrl": target["url"], "headers": {"A": "Bearer ${env:TOKEN_X}"}, "disabledTools": ["drop"]}
    gemini = {"httpUrl": target["url"], "headers": {"A": "Bearer $TOKEN_X"}, "timeout": 5000, "trust": True,
              "description": "Sums", "includeTools": ["add"]}  # fmt: skip
    remote = {"command": "npx", "args": ["mcp-remote", "http://x", "--header", "A:${OWN}"], "env": {"OWN": "o"}}
    entries = {"claude_code": claude_code, "cursor": cursor, "cline": cline, "windsurf": windsurf, "gemini": gemini}
    found = read(tmp_path, {"mcpServers": {**entries, "remote": remote, "off": {"command": "x", "enabled": False}}})
    assert "off" not in found
    for name in ("claude_code", "cline", "windsurf", "gemini"):
        assert (found[name]["url"], found[name]["headers"]) == ("http://x/mcp", {"A": "Bearer t"}), name
    types = {name: entry["type"] for name, entry in found.items()}
    assert types == {"claude_code": "http", "cursor": "stdio", "cline": "http", "windsurf": None, "gemini": "http",
                     "remote": "stdio"}  # fmt: skip
    assert found["cursor"]["command"] == os.path.expanduser("~/a") and found["cursor"]["env"] == {"K": "t"}
    assert found["cursor"]["args"] == [f"{tmp_path}/b", "$1"] and found["remote"]["args"][-1] == "A:o"
    assert found["windsurf"]["without"] == ["drop"] and found["gemini"]["only"] == ["add"]
    assert "timeout=5000 has no effect" in caplog.text


def test_a_file_of_vs_code_starts_its_server(tmp_path):
    """With comments, a trailing comma, an envFile, and tools that are left out."""
    (tmp_path / ".env").write_text("# secret\nexport GREETING='hi'\n")
    entry = {**sums(tmp_path), "type": "stdio", "envFile": str(tmp_path / ".env"), "excludeTools": ["wait"]}
    text = '{"inputs": [], // none\n"servers": {"sums": ' + json.dumps(entry) + ",}}"
    found = read(tmp_path, text)
    assert found["sums"]["env"] == {"GREETING": "hi"}
    assert read(tmp_path, {"mcp": {"servers": {"sums": entry}}}) == found  # older settings of VS Code
    tools = load_integration_tools(settings(mcp_config_file=str(tmp_path / "servers.json")))
    assert "wait" not in (names := [tool.__name__ for tool in tools]) and "add" in names
    assert talk(tools, call("add", a=2))[0].observation == "3"
    with pytest.raises(ValueError, match="has no tool 'ad', which the file lists"):
        tools_of(tmp_path, {"sums": {**sums(tmp_path), "includeTools": ["ad"]}})
    with pytest.raises(ValueError, match="offer no tools"):
        tools_of(tmp_path, {"sums": {**sums(tmp_path), "includeTools": []}})


def test_names_of_tools(tmp_path):
    """Two servers with a tool of one name: one is selected by its server's name."""
    two = {"a": sums(tmp_path), "b": sums(tmp_path)}
    with pytest.raises(ValueError, match="both have a tool 'add'. Select one with mcp_tools: \\[b:add"):
        tools_of(tmp_path, two)
    with pytest.raises(ValueError, match="mcp_tools: no server of .* offers 'sub'"):
        tools_of(tmp_path, two, mcp_tools=["sub"])
    assert [tool.__name__ for tool in tools_of(tmp_path, two, mcp_tools=["b:add"])] == ["add"]
    with pytest.raises(ValueError, match="mcp_tools has no effect without the key mcp_config_file"):
        load_integration_tools(settings(mcp_tools=["x"]))


VERL = """
tools:
  - class_name: {cls}
    config: {{rate_limit: 120, timeout: 20, type: mcp}}
    mcp: {{mcp_servers_config_path: servers.json, tool_selected_list: [{tool}]}}
"""


@pytest.mark.parametrize(
    "cls", ["verl.tools.mcp_base_tool.MCPBaseTool", "verl.tools.mcp_search_tool.MCPSearchTool", "written_mcp.Loud"]
)
def test_verls_entry_of_type_mcp(tmp_path, cls):
    """In the form of its own YAML. The servers stand beside it; a class may read results in its own way."""
    (tmp_path / "written_mcp.py").write_text(
        "from verl.tools.mcp_base_tool import MCPBaseTool\n\n\nclass Loud(MCPBaseTool):\n"
        "    def _parse_tool_result(self, content):\n        return content[0].text + '!', {'parts': len(content)}\n"
    )
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"sums": sums(tmp_path)}}))
    env = build(tools_config_file=write_yaml(tmp_path, VERL.format(cls=cls, tool="add")))()
    (rollout,) = converse(env, [[call("add", a=1), call("add", a="x"), ANSWER]], [{}])
    assert rollout.turns[0].observation == ("2!" if cls.startswith("written") else "2")
    assert rollout.turns[1].error == "tool" and list(rollout.tools) == ["add"]
    with pytest.raises(ValueError, match="tool_selected_list has \\['sub'\\]"):
        build(tools_config_file=write_yaml(tmp_path, VERL.format(cls=cls, tool="sub")))


def test_a_server_ends_with_its_trainer(tmp_path):
    """Also where that is killed: its end of the pipe is closed."""
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"sums": sums(tmp_path)}}))
    code = (
        "import os, sys, time\nfrom test_verl import settings\n"
        "from mt_grpo.recipe.integrations import load_integration_tools\n"
        f"load_integration_tools(settings(mcp_config_file={str(tmp_path / 'servers.json')!r}))\n"
        "print(os.getpid(), flush=True)\ntime.sleep(600)"
    )
    env = {**os.environ, "PYTHONPATH": IMPORTS}
    command = [warm_python.executable(), "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        trainer = int(process.stdout.readline())
        (child,) = psutil.Process(trainer).children()
        os.kill(trainer, signal.SIGKILL)
        assert ends(child.pid)
    finally:
        process.kill()
        process.wait()


def test_the_loop_is_one_of_its_own():
    assert background_loop(LOOP) is not background_loop()

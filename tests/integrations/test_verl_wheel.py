"""Files of verl's releases as they are in the wheels: tools, interactions, function tools, and their YAML.

They are found in two ways: as those of an installed verl, and next to the YAML if verl is not installed. Stand-ins
replace what they import and is not installed: ray, qwen_vl_utils.
"""

import ast
import functools
import importlib
import shutil
import subprocess
import sys
import types
import zipfile
from json import dumps, loads

import pytest
import requests
import vision_model
from conftest import data_file
from scripted import call
from test_environments import ANSWER
from test_mcp import wait_for
from test_verl import Ray, build, converse, free_port, fresh_verl, settings, write_yaml  # noqa: F401

from mt_grpo.conversation.tools.signature import tool_schema
from mt_grpo.images.pictures import mark_of, pictures_in
from mt_grpo.integrations.mcp import servers as mcp_servers
from mt_grpo.integrations.verl import paths as verl_paths
from mt_grpo.rollout import StopReason

pytestmark = pytest.mark.slow
OWN = "verl.tools."  # the modules of verl's own files; what is built in has the trainer's
FUNCTIONS = "tests/experimental/agent_loop/function_tool_examples.py"


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """Gives the folder of a release's files, which are unpacked and not installed."""
    folder = tmp_path_factory.mktemp("verl")
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--retries=1", "--no-deps", "--dest", str(folder)]

    @functools.cache
    def unpacked(version):
        ended = subprocess.run([*download, f"verl=={version}"], capture_output=True, text=True)
        if ended.returncode:
            pytest.skip(f"pip cannot download verl {version}: {ended.stderr.strip()[-200:]}")
        (wheel,) = folder.glob(f"verl-{version}-*.whl")
        zipfile.ZipFile(wheel).extractall(folder / version)
        return folder / version

    return unpacked


@pytest.fixture
def found(release, tmp_path, monkeypatch):
    """Has a file of a release be found, as one of an installed verl or next to the YAML."""
    monkeypatch.setitem(sys.modules, "ray", Ray("ray"))
    monkeypatch.setitem(sys.modules, "ray.actor", types.ModuleType("ray.actor"))

    def find(file, way, version="0.7.1"):
        folder = release(version)
        if way == "installed":
            monkeypatch.syspath_prepend(folder)
            package(monkeypatch, "verl", folder / "verl")  # its own `__init__` wants tensordict
            package(monkeypatch, "verl.utils", folder / "verl/utils")
        else:
            shutil.copy(folder / file, tmp_path)
            verl_paths.install()
            scores = importlib.import_module("verl.utils.reward_score")  # the release's own are read
            scores.__path__.append(str(folder / "verl/utils/reward_score"))
        return folder

    return find


def package(monkeypatch, name, folder):
    """Have the modules of a folder be those of a package, whose `__init__` is not run."""
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    monkeypatch.setitem(sys.modules, name, module)


def tool_of(env):
    (tool,) = env.environments.by_name[None].verl_tools.values()
    return tool


@pytest.fixture
def http(monkeypatch):
    """Answers what is posted: `http(answer)` gives an address and what was sent. `answer` gives (status, JSON)."""

    def start(answer):
        sent = []

        def post(url, json=None, data=None, **kwargs):
            sent.append(json or loads(data))
            status, content = answer(sent[-1])
            response = requests.Response()
            response.status_code, response._content = status, dumps(content).encode()
            return response

        monkeypatch.setattr(requests, "post", post)
        return "http://there", sent

    return start


WAYS = pytest.mark.parametrize("way", ["installed", "beside"])


def tools_yaml(folder, class_name, tool, argument, schema, **config):
    """The YAML of a tool with one argument, as the release's examples have it."""
    parameters = {"type": "object", "properties": {argument: schema}, "required": [argument]}
    function = {"name": tool, "description": f"The tool {tool}.", "parameters": parameters}
    entry = {"class_name": OWN + class_name, "config": {"type": "native", **config},
             "tool_schema": {"type": "function", "function": function}}  # fmt: skip
    return write_yaml(folder, dumps({"tools": [entry]}))


@WAYS
def test_the_sandbox_tool(found, tmp_path, http, caplog, way):
    """Against a server that answers in Sandbox Fusion's form, and runs nothing."""
    ran = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "42\n", "stderr": ""}
    failed = {**ran, "stdout": "", "stderr": "ZeroDivisionError", "return_code": 1}
    answers = {"print(6 * 7)": (200, {"status": "Success", "run_result": ran}),
               "1 / 0": (200, {"status": "Failed", "run_result": failed}), "busy": (500, {})}  # fmt: skip
    url, sent = http(lambda body: answers[body["code"]])
    found("verl/tools/sandbox_fusion_tools.py", way)
    config = tools_yaml(tmp_path, "sandbox_fusion_tools.SandboxFusionTool", "code_interpreter", "code",
                        {"type": "string"}, sandbox_fusion_url=f"{url}/run_code")  # fmt: skip
    env = build(tools_config_file=config)()
    (rollout,) = converse(env, [[*(call("code_interpreter", code=code) for code in answers), ANSWER]], [{}])
    assert type(tool_of(env)).__module__ == f"{OWN}sandbox_fusion_tools"
    assert [body["code"] for body in sent] == list(answers)
    assert [turn.observation for turn in rollout.turns[:3]] == ["42\n", "ZeroDivisionError", "no stdout here"]
    assert [turn.results[0].reward for turn in rollout.turns[:3]] == [None] * 3
    assert rollout.reward is None and "code_interpreter returned the reward [], not a finite number" in caplog.text


@WAYS
def test_the_zoom_tool(found, tmp_path, monkeypatch, way):
    """Its texts are read, and the image that it crops if the model reads images; another one reads why not."""
    image = pytest.importorskip("PIL.Image", reason="the tool crops images with Pillow")
    fetch = types.SimpleNamespace(fetch_image=lambda given: image.open(given["image"]))
    monkeypatch.setitem(sys.modules, "qwen_vl_utils", fetch)
    image.new("RGB", (100, 80)).save(tmp_path / "image.png")
    found("verl/tools/image_zoom_in_tool.py", way)
    name, schema = "image_zoom_in_tool", {"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4}
    config = tools_yaml(tmp_path, "image_zoom_in_tool.ImageZoomInTool", name, "bbox_2d", schema)
    env = build(tools_config_file=config)()
    row = {"tools_kwargs": {name: {"create_kwargs": {"image": str(tmp_path / "image.png")}}}}
    calls = [call(name, bbox_2d=[0, 0, 50, 40]), call(name, bbox_2d=[1])]
    with_image, without = converse(env, [[*calls, ANSWER], []], [row, {}])
    crops, short, _ = with_image.turns
    assert crops.observation == "Error: the tool returned an image, and this run's model reads text alone"
    assert short.observation == "Error: bbox_2d parameter is missing or not a list of 4 numbers."
    assert (short.results[0].reward, short.error) == (-0.05, None)
    assert without.stop_reason == StopReason.ENVIRONMENT_ERROR and "required 'image'" in str(without.error)
    tokenizer = env.tokenizer = vision_model.reading(vision_model.save(tmp_path / "model"))
    script = [tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in (calls[0], ANSWER)]
    (rollout,) = converse(env, [script], [row])
    (crop,) = pictures_in(rollout.completion_ids)
    assert crop is tokenizer.pictures.read(image.new("RGB", (50, 40)), "") and rollout.turns[0].error is None
    assert rollout.turns[0].observation.startswith(mark_of(crop))


SERVER = """
import json
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("Tavily Expert")


@server.tool()
def tavily_search_tool(query: str) -> str:
    return json.dumps({"query": query, "results": [{"title": "Paris"}]}) if query else 1 / 0


@server.tool()
def tavily_extract_tool(url: str) -> str:
    return url


server.run("sse", host="127.0.0.1", port=int(sys.argv[1]))
"""


@pytest.fixture
def tavily(tmp_path):
    """verl's YAML as it is, and its JSON with the address of a server that runs here."""
    port = free_port()
    (tmp_path / "tavily.py").write_text(SERVER)
    shutil.copy(data_file("plugins/verl/mcp_tool_config.yaml"), tmp_path)
    servers = data_file("plugins/verl/mcp_server.json").read_text()
    servers = servers.replace("your_tavily_expert_url", f"http://127.0.0.1:{port}/sse")
    (tmp_path / "mcp_server.json").write_text(servers)
    command = [sys.executable, str(tmp_path / "tavily.py"), str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_for(port)
        yield tmp_path / "mcp_tool_config.yaml"
    finally:
        mcp_servers.close_servers()
        process.terminate()
        process.wait(timeout=30)


@pytest.mark.parametrize("way", ["installed", "beside", "built in"])
def test_the_mcp_search_tool(found, tavily, tmp_path, way):
    """The release's stands on the base class that is built in: verl's own imports what is not even in the wheel."""
    if way != "built in":
        folder = found("verl/tools/mcp_search_tool.py", way)
        shutil.copy(folder / "verl/tools/mcp_base_tool.py", tmp_path)
    env = build(tools_config_file=str(tavily))()
    calls = [
        *(call("tavily_search_tool", query=query) for query in ("France", "")),
        call("tavily_extract_tool", url="x"),
    ]
    (rollout,) = converse(env, [[*calls, ANSWER]], [{}])
    built_in = "mt_grpo.integrations.verl.mcp"
    cls = type(tool_of(env))
    assert cls.__module__ == (built_in if way == "built in" else f"{OWN}mcp_search_tool")
    assert cls.__base__.__module__ == built_in
    found_it, failed, unknown = rollout.turns[:3]
    assert found_it.observation == '[{"title": "Paris"}]'
    assert (failed.error, failed.observation) == ("tool", "Error: Error executing tool tavily_search_tool")
    assert unknown.error == "call"  # tool_selected_list
    assert rollout.environment.agent_data.metrics["tavily_search_tool"][0]["queries"] == ["France"]


@WAYS
def test_a_tool_whose_schema_is_that_of_a_method(found, tmp_path, way):
    """The weather tool of the release's test of its agent loop; its entry has no `tool_schema`."""
    folder = found("verl/tools/schemas.py", way, "0.9.1")
    source = (folder / "tests/experimental/agent_loop/test_basic_agent_loop.py").read_text()
    (node,) = [node for node in ast.parse(source).body if getattr(node, "name", None) == "WeatherTool"]
    head = """
import json
from typing import Any
from transformers.utils import get_json_schema
from verl.tools.base_tool import BaseTool, OpenAIFunctionToolSchema
from verl.tools.schemas import ToolResponse
"""
    text = "tools: [{class_name: written_tools.WeatherTool, config: {type: native}}]"
    env = build(tools_config_file=write_yaml(tmp_path, text, head + ast.unparse(node)))()
    name = "get_current_temperature"
    (rollout,) = converse(env, [[call(name, location="Paris"), call(name, unit="celsius"), ANSWER]], [{}])
    assert rollout.turns[0].observation == '{"temperature": 26.1, "location": "Paris", "unit": "celsius"}'
    assert rollout.turns[1].error == "call"
    schema = tool_schema(name, env.environments.tools_of_class({})[name])["function"]["parameters"]
    assert schema["properties"]["unit"]["enum"] == ["celsius", "fahrenheit"] and schema["required"] == ["location"]

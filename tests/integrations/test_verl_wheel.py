"""Files of verl's releases as they are in the wheels: tools, interactions, function tools, and their YAML.

They are found in two ways: as those of an installed verl, and beside the YAML where verl is not installed. Stand-ins
are there for what they import and is not installed: ray, qwen_vl_utils.
"""

import ast
import functools
import importlib
import json
import shutil
import subprocess
import sys
import threading
import types
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import vision_model
from conftest import data_file
from scripted import CHATML_TOKENIZER, Scripted, call
from test_environments import ANSWER
from test_mcp import wait_for
from test_verl import Ray, build, converse, free_port, fresh_verl, settings, write_yaml  # noqa: F401

import mt_grpo_trainer as mt
from mt_grpo.base.pictures import pictures_in
from mt_grpo.conversation.pictures import mark_of
from mt_grpo.conversation.tools.signature import tool_schema
from mt_grpo.integrations.mcp import servers as mcp_servers
from mt_grpo.integrations.verl import paths as verl_paths
from mt_grpo.recipe.integrations import load_integration_tools
from mt_grpo.rollout import StopReason

pytestmark = pytest.mark.slow
OWN = "verl.tools."  # the modules of verl's own files; what is built in has the trainer's


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """Gives the folder of a release's files, which are unpacked and not installed."""
    folder = tmp_path_factory.mktemp("verl")

    @functools.cache
    def unpacked(version):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--retries=1", "--no-deps"]
        command += ["--dest", str(folder)]
        ended = subprocess.run([*command, f"verl=={version}"], capture_output=True, text=True)
        if ended.returncode:
            pytest.skip(f"pip cannot download verl {version}: {ended.stderr.strip()[-200:]}")
        (wheel,) = folder.glob(f"verl-{version}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / version)
        return folder / version

    return unpacked


@pytest.fixture
def found(release, tmp_path, monkeypatch):
    """Has a file of a release be found, as one of an installed verl or beside the YAML."""
    monkeypatch.setitem(sys.modules, "ray", Ray("ray"))
    monkeypatch.setitem(sys.modules, "ray.actor", types.ModuleType("ray.actor"))

    def find(file, way, version="0.7.1"):
        folder = release(version)
        if way == "installed":
            # Where it is found from the start, as an installed one: what stands for a missing verl comes last then.
            monkeypatch.syspath_prepend(folder)
            others = [each for each in sys.meta_path if not isinstance(each, verl_paths.VerlPaths)]
            monkeypatch.setattr(sys, "meta_path", others)
            package(monkeypatch, "verl", folder / "verl")  # its own `__init__` wants tensordict
            package(monkeypatch, "verl.utils", folder / "verl/utils")
        else:
            shutil.copy(folder / file, tmp_path)
            for name in [each for each in verl_paths.MODULES if each.startswith("verl.utils.reward_score.")]:
                monkeypatch.delitem(verl_paths.MODULES, name)  # the release's own are read
                monkeypatch.delitem(sys.modules, name, raising=False)
            verl_paths.install()
            scores = importlib.import_module("verl.utils.reward_score")
            scores.__path__.append(str(folder / "verl/utils/reward_score"))
        return folder

    return find


def package(monkeypatch, name, folder):
    """Have the modules of a folder be those of a package, whose `__init__` is not run."""
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    monkeypatch.setitem(sys.modules, name, module)


def module_with(monkeypatch, name, **contents):
    module = types.ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def tool_of(env):
    (tool,) = env.environments.by_name[None].verl_tools.values()
    return tool


@pytest.fixture
def http():
    """A server on loopback: `http(answer)` gives its address and what it was sent. `answer` gives (status, JSON)."""
    servers = []

    def start(answer):
        sent = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                sent.append(body)
                status, content = answer(body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(content).encode())

            def log_message(self, *_):
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}", sent

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


WAYS = pytest.mark.parametrize("way", ["installed", "beside"])

# -- tools that judge an answer --

JUDGE = """
tools:
  - class_name: "verl.tools.{name}_tool.{cls}"
    config:
      type: native
    tool_schema:
      type: "function"
      function:
        name: "calc_{name}_reward"
        description: "A tool for calculating the reward of {name}."
        parameters:
          type: "object"
          properties:
            answer:
              type: "string"
              description: "The model's answer to the {name} problem, must be a digits"
          required: ["answer"]
"""


@WAYS
@pytest.mark.parametrize("name, cls", [("gsm8k", "Gsm8kTool")])
def test_tools_that_judge(found, tmp_path, monkeypatch, name, cls, way):
    """An answer that is no better than the one before costs 0.05; the outcome reward is the last one's."""
    found(f"verl/tools/{name}_tool.py", way)
    env = build(tools_config_file=write_yaml(tmp_path, JUDGE.format(name=name, cls=cls)))()
    tool = f"calc_{name}_reward"
    row = {"extra_info": {"tools_kwargs": {tool: {"create_kwargs": {"ground_truth": "72"}}}}}
    scripts = [[call(tool, answer="5"), call(tool, answer="72"), ANSWER], [call(tool, answer="72"), ANSWER]]
    first, second = converse(env, scripts, [row, row])
    assert type(tool_of(env)).__module__ == f"{OWN}{name}_tool"
    assert [turn.observation for turn in first.turns] == [
        "Current parsed answer='5' reward=0.0", "Current parsed answer='72' reward=1.0", None,
    ]  # fmt: skip
    assert [turn.results[0].reward for turn in first.turns[:2]] == [-0.05, 0.0]
    assert (second.turns[0].results[0].reward, first.reward, second.reward) == (0.0, 1.0, 1.0)
    assert tool_of(env)._instance_dict == {}  # all were released


# -- tools that ask a server --

SEARCH = """
tools:
  - class_name: verl.tools.search_tool.SearchTool
    config:
      retrieval_service_url: URL
      num_workers: 120
      rate_limit: 120
      timeout: 30
      type: native
    tool_schema:
      type: function
      function:
        name: search
        description: Searches the web for relevant information based on the given query.
        parameters:
          type: object
          properties:
            query_list:
              type: array
              item:
                type: string
              description: A list of fully-formed semantic queries.
          required:
            - query_list
"""


@WAYS
def test_the_search_tool(found, tmp_path, http, way):
    document = {"document": {"contents": "Paris\nA city of France."}, "score": 0.5}
    url, sent = http(lambda body: (200, {"result": [[document] * ("France" in query) for query in body["queries"]]}))
    found("verl/tools/search_tool.py", way)
    env = build(tools_config_file=write_yaml(tmp_path, SEARCH.replace("URL", url)))()
    calls = [call("search", query_list=["France"]), call("search", query_list=["x"]), call("search", query_list="x")]
    (rollout,) = converse(env, [[*calls, ANSWER]], [{}])
    assert type(tool_of(env)).__module__ == f"{OWN}search_tool"
    assert sent == [{"queries": [query], "topk": 3, "return_scores": True} for query in ("France", "x")]
    assert [turn.observation for turn in rollout.turns] == [
        '{"result": "Doc 1 (Title: Paris)\\nA city of France."}',
        '{"result": ""}' if way == "installed" else '{"result": "No search results found."}',
        '{"result": "Error: \'query_list\' is missing, empty, or not a list in parameters."}',
        None,
    ]
    assert [turn.results[0].reward for turn in rollout.turns[:3]] == [0.0] * 3 and rollout.reward is None


SANDBOX = """
tools:
  - class_name: "verl.tools.sandbox_fusion_tools.SandboxFusionTool"
    config: {
      "sandbox_fusion_url": "URL/run_code"
    }
    tool_schema:
      type: "function"
      function:
        name: "code_interpreter"
        description: "A tool for executing code."
        parameters:
          type: "object"
          properties:
            code:
              type: "string"
              description: "The code to execute."
          required: ["code"]
"""
RAN = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "", "stderr": ""}


def sandbox(body):
    """Answers in Sandbox Fusion's form, and runs nothing."""
    if "timeout" in body["code"]:
        return 200, {"status": "Failed", "run_result": {**RAN, "status": "TimeLimitExceeded"}}
    if "busy" in body["code"]:
        return 500, {}
    ran = {"print(6 * 7)": {"stdout": "42\n"}, "1 / 0": {"stderr": "ZeroDivisionError", "return_code": 1}}
    run_result = {**RAN, **ran[body["code"]]}
    return 200, {"status": "Failed" if run_result["return_code"] else "Success", "run_result": run_result}


@WAYS
def test_the_sandbox_tool(found, tmp_path, http, caplog, way):
    url, sent = http(sandbox)
    found("verl/tools/sandbox_fusion_tools.py", way)
    env = build(tools_config_file=write_yaml(tmp_path, SANDBOX.replace("URL", url)))()
    codes = ["print(6 * 7)", "1 / 0", "timeout", "busy"]
    (rollout,) = converse(env, [[*(call("code_interpreter", code=code) for code in codes), ANSWER]], [{}])
    assert type(tool_of(env)).__module__ == f"{OWN}sandbox_fusion_tools"
    assert sent[0] == {
        "compile_timeout": 30, "run_timeout": 30, "code": "print(6 * 7)", "stdin": None, "memory_limit_MB": 1024,
        "language": "python", "files": {}, "fetch_files": [],
    }  # fmt: skip
    assert [body["code"] for body in sent] == codes
    assert [turn.observation for turn in rollout.turns] == [
        "42\n", "ZeroDivisionError", "no stdout here", "no stdout here", None,
    ]  # fmt: skip
    assert [turn.results[0].reward for turn in rollout.turns[:4]] == [None] * 4
    assert rollout.reward is None and "code_interpreter returned the reward [], not a finite number" in caplog.text


# -- images --

ZOOM = """
tools:
  - class_name: "verl.tools.image_zoom_in_tool.ImageZoomInTool"
    config:
      type: native
    tool_schema:
      type: "function"
      function:
        name: "image_zoom_in_tool"
        description: "Zoom in on a specific region of an image by cropping it based on a bounding box (bbox)."
        parameters:
          type: "object"
          properties:
            bbox_2d:
              type: "array"
              items:
                type: "number"
              minItems: 4
              maxItems: 4
              description: "The bounding box of the region to zoom in, as [x1, y1, x2, y2]."
            label:
              type: "string"
              description: "The name or label of the object in the specified bounding box (optional)."
          required: ["bbox_2d"]
"""


@WAYS
def test_the_zoom_tool(found, tmp_path, monkeypatch, way):
    """Its texts are read, and the image that it crops where the model reads images; another one reads why not."""
    image = pytest.importorskip("PIL.Image", reason="the tool crops images with Pillow")
    module_with(monkeypatch, "qwen_vl_utils", fetch_image=lambda given: image.open(given["image"]))
    image.new("RGB", (100, 80)).save(tmp_path / "image.png")
    found("verl/tools/image_zoom_in_tool.py", way)
    env = build(tools_config_file=write_yaml(tmp_path, ZOOM))()
    name = "image_zoom_in_tool"
    row = {"tools_kwargs": {name: {"create_kwargs": {"image": str(tmp_path / "image.png")}}}}
    calls = [call(name, bbox_2d=[0, 0, 50, 40]), call(name, bbox_2d=[50, 0, 0, 40]), call(name, bbox_2d=[1])]
    with_image, without = converse(env, [[*calls, ANSWER], []], [row, {}])
    crops, invalid, short, _ = with_image.turns
    assert crops.observation == "Error: the tool returned an image, and this run's model reads text alone"
    assert invalid.observation == (
        "Error: The specified bounding box [50, 0, 0, 40] is invalid or results in a crop smaller than the minimum "
        "size of 28x28."
    )
    assert short.observation == "Error: bbox_2d parameter is missing or not a list of 4 numbers."
    assert (invalid.results[0].reward, short.results[0].reward, short.error) == (-0.05, -0.05, None)
    assert without.stop_reason == StopReason.ENVIRONMENT_ERROR and "required 'image'" in str(without.error)
    tokenizer = env.tokenizer = vision_model.reading(vision_model.save(tmp_path / "model"))
    script = [tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in (calls[0], ANSWER)]
    (rollout,) = converse(env, [script], [row])
    (crop,) = pictures_in(rollout.completion_ids)
    assert crop is tokenizer.pictures.read(image.new("RGB", (50, 40)), "") and rollout.turns[0].error is None
    assert rollout.turns[0].observation.startswith(mark_of(crop))


# -- tools behind MCP servers --

SERVER = """
import json
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("Tavily Expert")


@server.tool()
def tavily_search_tool(query: str) -> str:
    found = [{"title": "Paris", "url": "http://x", "content": "A city."}] * (query == "France")
    return json.dumps({"query": query, "results": found}) if query else 1 / 0


@server.tool()
def tavily_extract_tool(url: str) -> str:
    return url


server.run("sse", host="127.0.0.1", port=int(sys.argv[1]))
"""
FAILED = "Error executing tool tavily_search_tool"
PARIS = '[{"title": "Paris", "url": "http://x", "content": "A city."}]'


@pytest.fixture
def tavily(tmp_path):
    """verl's YAML as it is, and its JSON with the address of a server that runs here."""
    port = free_port()
    (tmp_path / "tavily.py").write_text(SERVER)
    shutil.copy(data_file("plugins/verl/mcp_tool_config.yaml"), tmp_path)
    servers = data_file("plugins/verl/mcp_server.json").read_text()
    assert servers.count("your_tavily_expert_url") == 1
    (tmp_path / "mcp_server.json").write_text(
        servers.replace("your_tavily_expert_url", f"http://127.0.0.1:{port}/sse")
    )
    command = [sys.executable, str(tmp_path / "tavily.py"), str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_for(port)
        yield tmp_path / "mcp_tool_config.yaml"
    finally:
        mcp_servers.close_servers()
        process.terminate()
        process.wait(timeout=30)


CALLS = [call("tavily_search_tool", query="France"), call("tavily_search_tool", query=""),
         call("tavily_extract_tool", url="x"), ANSWER]  # fmt: skip


def search(config):
    env = build(tools_config_file=str(config))()
    (rollout,) = converse(env, [CALLS], [{}])
    assert list(rollout.tools) == ["tavily_search_tool"]  # tool_selected_list
    assert rollout.turns[2].error == "call"
    return env, rollout


def test_the_mcp_yaml_with_what_is_built_in(tavily):
    env, rollout = search(tavily)
    assert type(tool_of(env)).__module__ == "mt_grpo.integrations.verl.mcp"
    assert rollout.turns[0].observation == PARIS
    assert (rollout.turns[1].error, rollout.turns[1].observation) == ("tool", f"Error: {FAILED}")


@WAYS
def test_the_mcp_search_tool_of_the_wheel(found, tavily, tmp_path, way):
    """It stands on the base class that is built in: verl's own imports what is not even in the wheel."""
    folder = found("verl/tools/mcp_search_tool.py", way)
    if way == "beside":
        shutil.copy(folder / "verl/tools/mcp_base_tool.py", tmp_path)
    env, rollout = search(tavily)
    assert type(tool_of(env)).__module__ == f"{OWN}mcp_search_tool"
    assert type(tool_of(env)).__base__.__module__ == "mt_grpo.integrations.verl.mcp"
    assert rollout.turns[0].observation == PARIS
    assert (rollout.turns[1].error, rollout.turns[1].observation) == ("tool", f"Error: {FAILED}")
    assert rollout.environment.agent_data.metrics["tavily_search_tool"][0]["queries"] == ["France"]


# -- interactions --

INTERACTION = """
interaction:
  - name: "{name}"
    class_name: "verl.interactions.{name}_interaction.{cls}"
    config: {{}}
"""


def interaction(folder, name, cls):
    (folder / "talk.yaml").write_text(INTERACTION.format(name=name, cls=cls))
    return str(folder / "talk.yaml")


@WAYS
def test_the_gsm8k_interaction(found, tmp_path, way):
    found("verl/interactions/gsm8k_interaction.py", way)
    env = build(interaction_config_file=interaction(tmp_path, "gsm8k", "Gsm8kInteraction"))()
    kwargs = {"name": "gsm8k", "query": "How many?", "ground_truth": "72"}
    (rollout,) = converse(env, [["#### 71", "So #### 72"]], [{"extra_info": {"interaction_kwargs": kwargs}}])
    wrong = "Your response is incorrect! You need to reflect on your answer and try again."
    assert [turn.observation for turn in rollout.turns] == [wrong, None]
    assert [turn.reward for turn in rollout.turns] == [0.0, 1.0] and rollout.reward == 1.0
    (talk,) = env.environments.by_name[None].interactions.values()
    assert type(talk).__module__ == "verl.interactions.gsm8k_interaction" and talk._instance_dict == {}


@WAYS
def test_the_weather_interaction(found, release, tmp_path, way):
    """It looks for a tool's message in the conversation, and ends it in either case."""
    found("verl/interactions/weather_interaction.py", way)
    functions = release("0.9.1") / "tests/experimental/agent_loop/function_tool_examples.py"
    shutil.copy(functions, tmp_path / "written_functions.py")
    env = build(
        interaction_config_file=interaction(tmp_path, "weather", "WeatherInteraction"),
        function_tool_path=str(tmp_path / "written_functions.py"),
    )()
    row = {"extra_info": {"interaction_kwargs": {"name": "weather"}}}
    asked, silent = converse(env, [[call("get_weather", city="Tokyo"), "17.3."], ["Warm."]], [row, row])
    assert asked.turns[0].observation == '{"temperature_c": 17.3, "condition": "drizzle"}'
    assert (asked.turns[1].reward, asked.reward, silent.turns[0].reward, silent.reward) == (1.0, 1.0, 0.0, 0.0)
    assert [rollout.stop_reason for rollout in (asked, silent)] == [StopReason.ENVIRONMENT_STOP] * 2
    assert silent.turns[0].info["said"] == "Please use the weather tool to get the weather information."


# -- 0.9.1: function tools, and tools of its own tests --


def text_of(path, name):
    """A text that a Python file gives a name."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path} has no {name}")


@WAYS
def test_function_tools(found, tmp_path, way):
    """The examples of the release."""
    folder = found("tests/experimental/agent_loop/function_tool_examples.py", way, "0.9.1")
    path = tmp_path / "written_functions.py"
    shutil.copy(folder / "tests/experimental/agent_loop/function_tool_examples.py", path)
    tools = load_integration_tools(settings(function_tool_path=str(path)))
    env = mt.MultiTurnToolEnv(tools, None, 6, tokenizer=CHATML_TOKENIZER)
    calls = [call("get_weather", city="Tokyo"), call("calculator", expression="(3+4)*5"),
             call("fetch_url", url="http://x"), call("calculator", expression=5), ANSWER]  # fmt: skip
    (rollout,) = env.generate(["?"], Scripted([calls]))["rollouts"]
    assert [turn.observation for turn in rollout.turns[:3]] == [
        '{"temperature_c": 17.3, "condition": "drizzle"}', "35", "<stub body for http://x>",
    ]  # fmt: skip
    assert rollout.turns[3].error == "call" and "'expression'" in rollout.turns[3].observation


@WAYS
def test_tools_by_yaml_and_functions_together(found, tmp_path, monkeypatch, way):
    """The YAML, the functions and the classes of the release's own tests."""
    folder = found("tests/tools/_stub_search_tools.py", way, "0.9.1")
    package(monkeypatch, "tests", folder / "tests")
    package(monkeypatch, "tests.tools", folder / "tests/tools")
    monkeypatch.delitem(sys.modules, "tests.tools._stub_search_tools", raising=False)
    source = folder / "tests/tools/test_mixed_tools_on_cpu.py"
    config = write_yaml(tmp_path, text_of(source, "_NATIVE_TOOL_YAML"))
    (tmp_path / "written_functions.py").write_text(text_of(source, "_FUNCTION_TOOL_BODY"))
    env = build(tools_config_file=config, function_tool_path=str(tmp_path / "written_functions.py"))()
    calls = [call("search", query_list=["foo", "bar"]), call("crawler", url_list=["http://a"]),
             call("get_weather", city="Tokyo"), call("calculator", expression="2 + 3 * 4")]  # fmt: skip
    (rollout,) = converse(env, [[*calls, ANSWER]], [{}])
    assert [turn.observation for turn in rollout.turns] == [
        "hits-for:foo; hits-for:bar", "crawled:http://a", '{"temperature_c": 17.3, "condition": "drizzle"}', "14",
        None,
    ]  # fmt: skip
    found_tools = env.environments.by_name[None].verl_tools
    assert found_tools["search"].calls == [{"query_list": ["foo", "bar"]}]
    assert rollout.environment.agent_data.metrics == {"search": [{"num_queries": 2}], "crawler": [{"num_urls": 1}]}


def classes_of(path, *names):
    """The source of classes of a file, beneath what they import."""
    lines = path.read_text().splitlines()
    head = ["import json", "from typing import Any", "from transformers.utils import get_json_schema",
            "from verl.tools.base_tool import BaseTool, OpenAIFunctionToolSchema",
            "from verl.tools.schemas import ToolResponse"]  # fmt: skip
    nodes = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) in names]
    return "\n".join(head + [line for node in nodes for line in lines[node.lineno - 1 : node.end_lineno]])


@WAYS
def test_tools_whose_schema_is_that_of_a_method(found, tmp_path, way):
    """The weather tools of the release's test of its agent loop; their entries have no `tool_schema`."""
    folder = found("verl/tools/base_tool.py", way, "0.9.1")
    (tmp_path / "base_tool.py").unlink(missing_ok=True)
    source = folder / "tests/experimental/agent_loop/test_basic_agent_loop.py"
    text = """
    tools: [{class_name: written_tools.WeatherTool, config: {type: native}},
            {class_name: written_tools.WeatherToolWithData, config: {type: native}}]
    """
    classes = classes_of(source, "WeatherTool", "WeatherToolWithData")
    env = build(tools_config_file=write_yaml(tmp_path, text, classes))()
    calls = [call("get_current_temperature", location="Paris"),
             call("get_temperature_date", location="Paris", date="2024-10-01", unit="fahrenheit"),
             call("get_current_temperature", unit="celsius")]  # fmt: skip
    (rollout,) = converse(env, [[*calls, ANSWER]], [{}])
    assert [turn.observation for turn in rollout.turns[:2]] == [
        '{"temperature": 26.1, "location": "Paris", "unit": "celsius"}',
        '{"temperature": 25.9, "location": "Paris", "date": "2024-10-01", "unit": "fahrenheit"}',
    ]
    assert rollout.turns[2].error == "call"
    name = "get_current_temperature"
    schema = tool_schema(name, env.environments.tools_of_class({})[name])["function"]["parameters"]
    assert schema["properties"]["unit"]["enum"] == ["celsius", "fahrenheit"] and schema["required"] == ["location"]

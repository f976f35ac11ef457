"""A vision-language model with random weights, its tokenizer and its processor, as a folder: for tests of pictures."""

import base64
import contextlib
import io
import random
import threading

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mt_grpo.base.event_loop import LOOP_THREAD, background_loop
from mt_grpo.images.pictures import Picture, with_pictures
from mt_grpo.images.reader import image_reader

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

# As Qwen's own: with tools, and results in a message of the user.
HERMES_TEMPLATE = """{%- macro shown(content) -%}
{%- if content is string -%}{{- content -}}
{%- else -%}{%- for part in content or [] -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{- '<|im_start|>system\n<tools>' -}}
{%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\n</tools><|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' + shown(message.content) + '\n</tool_response>' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\n' + shown(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson -}}{{- '}\n</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""


def picture(seed, size=(56, 56)):
    """A picture of random pixels."""
    rng = random.Random(seed)
    image = Image.new("RGB", (4, 4))
    image.putdata([tuple(rng.randrange(256) for _ in range(3)) for _ in range(16)])
    return image.resize(size, Image.Resampling.NEAREST)


def read(tokenizer, *images):
    """Images as the model reads them, each of a seed, or of (seed, size)."""
    made = (picture(*image) if isinstance(image, tuple) else picture(image) for image in images)
    return [tokenizer.pictures.read(image, "") for image in made]


def as_bytes(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def as_uri(content, kind="png"):
    """A data URI of an image, or of the bytes of one."""
    content = content if isinstance(content, bytes) else as_bytes(content)
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def ids_of(plain, *parts):
    """The ids of texts and images, one after the other, by hand. `plain` is a tokenizer that reads text alone."""
    start, end = plain.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
    ids = []
    for part in parts:
        text = isinstance(part, str)
        ids += plain(part, add_special_tokens=False)["input_ids"] if text else [start, *part.ids, end]
    return ids


def expected_ids(folder, text, pictures):
    """The ids of a text, by the tokenizer as it is saved, with as many ids of each image as it has tokens."""
    ids, following, plain = [], iter(pictures), AutoTokenizer.from_pretrained(folder)
    for token in plain(text, add_special_tokens=False)["input_ids"]:
        ids += next(following).ids if token == plain.convert_tokens_to_ids("<|image_pad|>") else [token]
    assert next(following, None) is None
    return ids


def make_tokenizer():
    texts = [
        "Which digit is in the picture? user assistant system tool <tool> </tool> <answer> </answer> name args"
    ] * 9
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=320, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    return fast


def make_model(tokenizer, family="qwen2_5_vl"):
    """Of the families `qwen2_5_vl` and `qwen3_vl`, 0.2M parameters. vLLM's CPU kernels ask for heads of 32 or more."""
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
             "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}  # fmt: skip
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}
    text = {
        "vocab_size": len(tokenizer) + 4, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024, "initializer_range": 0.1,
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 14, "in_channels": 3,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "initializer_range": 0.1,
    }  # fmt: skip
    if family == "qwen2_5_vl":
        config, kind = Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
        vision |= {"window_size": 112, "fullatt_block_indexes": [1]}
    else:
        config, kind = Qwen3VLConfig, Qwen3VLForConditionalGeneration
        text |= {"head_dim": 32, "rope_parameters": {**text["rope_parameters"], "mrope_interleaved": True}}
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    model = kind(config(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)).float()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def reading(folder):
    """The tokenizer of a saved model, which writes pictures."""
    found = AutoTokenizer.from_pretrained(folder)
    return with_pictures(found, image_reader(str(folder), AutoConfig.from_pretrained(folder), found))


@contextlib.contextmanager
def read_off_the_loop(tokenizer, at_least=1):
    """Each picture that is read meanwhile waits until the event loop of the conversations has done something else.

    Where a picture is decoded on that loop, it never does, and reading one fails.
    """
    reader, loop, num_read = tokenizer.pictures, background_loop(LOOP_THREAD), 0

    class Waits:
        def __getattr__(self, name):
            return getattr(reader, name)

        def read(self, value, *args, **kwargs):
            nonlocal num_read
            if isinstance(value, Picture):  # it was read before
                return value
            num_read += 1
            went_on = threading.Event()
            loop.call_soon_threadsafe(went_on.set)
            assert went_on.wait(20), "a picture was decoded on the event loop of all conversations"
            return reader.read(value, *args, **kwargs)

    tokenizer.pictures = Waits()
    try:
        yield
    finally:
        tokenizer.pictures = reader
    assert num_read >= at_least


def save(folder, family="qwen2_5_vl", seed=0, template=TEMPLATE):
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    make_model(tokenizer, family).save_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
    Qwen2VLImageProcessorPil(patch_size=14, temporal_patch_size=2, merge_size=2, size=size).save_pretrained(folder)
    return folder

"""Build the pictures of the zoom task, and the bundled model that reads them: a Qwen2.5-VL of 1M parameters.

    python scripts/build/zoom.py --data      # pictures and questions, in a second
    python scripts/build/zoom.py             # the model, in two minutes of one core

A grey picture has a digit of 3 x 5 pixels in each corner, no digit twice. The image processor makes it at most 56 x 56
pixels large: a digit is less than two pixels of it, and large in the corner that `tools/zoom.py` enlarges.
The model imitates conversations without mistakes, then some whose calls mostly take left for right: it knows how to
write calls and answers, and looks at the wrong corner, also with greedy decoding.
"""

import base64
import io
import random
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/ and in the clone's root
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])

from PIL import Image
from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration as VisionModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from build import common
from build.common import Example, draw, encode, opening
from mt_grpo.conversation.formats.base import ChatFormat
from mt_grpo.conversation.formats.choose import TOOL_FORMATS
from mt_grpo.conversation.tools.signature import named_tools
from mt_grpo.images.messages import mark_of
from mt_grpo.images.pictures import Picture, with_pictures
from mt_grpo.images.reader import image_reader
from mt_grpo.rollout import Message
from tools.zoom import CORNERS, PARTS, Zoom

RECIPE = "hf_recipes/tiny/zoom.yaml"
SYSTEM = "Use zoom, then answer."
NUM_ROWS = {"train": 640, "test": 512}
LARGEST = 56  # pixels of a side that the model reads
CORNER = 8  # pixels of a corner's side, of which a digit takes 3 x 5

# Rows of the ten digits, from above: three bits each.
DIGITS = [
    (7, 5, 5, 5, 7), (2, 6, 2, 2, 7), (7, 1, 7, 4, 7), (7, 1, 3, 1, 7), (5, 5, 7, 1, 1),
    (7, 4, 7, 1, 7), (4, 4, 7, 5, 7), (7, 1, 2, 2, 2), (7, 5, 7, 5, 7), (7, 5, 7, 1, 1),
]  # fmt: skip

# Shares of what a turn does. FORK: change what the policy gets wrong.
Shares = dict[str, int]
RIGHT = ({"good": 1}, {"good": 1})
CALL_SHARES = {"good": 24, "left for right": 48, "any corner": 10, "broken JSON": 8, "no call": 6, "no tag": 4}
ANSWER_SHARES = {"good": 74, "other digit": 20, "no tag": 6}
MAX_CALLS = 2
MAX_RESULT_TOKENS = 48  # longer errors are cut, as in the recipe
TOOLS = named_tools([Zoom().zoom])  # read, not called

VISION_TOKENS = {
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
}  # fmt: skip
CHAT_TEMPLATE = (common.TINY / "zoom-model/chat_template.jinja").read_text(encoding="utf-8")

# -- Pictures and rows --


def draw_picture(digits: list[int], scale: int, rng: random.Random) -> Image.Image:
    """A picture with these digits in its corners, in the order of `CORNERS`, `scale` pixels for each of a digit's.

    Each digit has a brightness of its own, and one of four places in its corner.
    """
    side, last = CORNER * PARTS, CORNER * (PARTS - 1)
    image = Image.new("L", (side, side), rng.randint(20, 70))
    for corner, digit in zip(CORNERS, digits, strict=True):
        ink = rng.randint(150, 250)
        left = last * corner.endswith("right") + rng.randint(2, 3)
        top = last * corner.startswith("bottom") + rng.randint(1, 2)
        for y, bits in enumerate(DIGITS[digit]):
            for x in range(3):
                if bits >> (2 - x) & 1:
                    image.putpixel((left + x, top + y), ink)
    return image.resize((side * scale, side * scale), Image.Resampling.NEAREST)


def make_rows(split: str, size: int, scale: int = 1) -> list[dict[str, Any]]:
    """Rows of a split, each a picture of PIL and a question about one of its corners; splits share no picture."""
    rng, rows = random.Random(f"zoom {split}"), []
    for _ in range(size):
        digits, place = rng.sample(range(10), 4), rng.randrange(4)
        row = {"question": f"Which digit is {CORNERS[place]}?", "answer": str(digits[place]), "corner": CORNERS[place]}
        rows.append({**row, "image": draw_picture(digits, scale, rng), "digits": digits})
    return rows


def write_data(folder: Path, num_rows: dict[str, int], scale: int = 1) -> None:
    """The splits as JSON lines, with pictures as data URIs."""
    for split, size in num_rows.items():
        rows = make_rows(split, size, scale)
        for row in rows:
            file = io.BytesIO()
            row["image"].save(file, "PNG", optimize=True)
            row["image"] = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
            del row["digits"]
        common.write_lines(folder / f"{split}.jsonl", rows)


# -- Conversations with known mistakes --


def call_turn(kind: str, corner: str, rng: random.Random) -> str:
    """What the assistant says before it has a crop, where a corner is asked for."""
    if kind == "left for right":
        corner = corner.replace("left", "r").replace("right", "left").replace(" r", " right")
    if kind == "any corner":
        corner = rng.choice(CORNERS)
    if kind == "no call":
        return f"<answer>{rng.randrange(10)}</answer>"
    if kind == "no tag":
        return corner
    text = common.call("zoom", corner=corner)
    return rng.choice((text[:-8] + "</tool>", text.replace('"}}', '"}'))) if kind == "broken JSON" else text


def answer_turn(kind: str, digit: int, rng: random.Random) -> str:
    """The assistant's message about a crop with this digit."""
    if kind == "other digit":
        digit = rng.choice([other for other in range(10) if other != digit])
    return str(digit) if kind == "no tag" else f"<answer>{digit}</answer>"


def make_conversation(
    row: dict[str, Any], tool_format: ChatFormat, call_shares: Shares, answer_shares: Shares, rng: random.Random
) -> tuple[list[Message], list[Picture]]:
    """One conversation about a row, and the pictures that its marks name; a failed call is followed by another try."""
    environment, reader = Zoom(), tool_format.tokenizer.pictures
    environment.reset(row["image"])
    shown = [reader.read(row["image"], "the row")]
    messages = opening(mark_of(shown[0]) + row["question"], SYSTEM)
    for _ in range(MAX_CALLS):
        text = call_turn(draw(call_shares, rng), row["corner"], rng)
        turn = common.observe(text, tool_format, TOOLS, lambda call: environment.zoom(**call.arguments))
        messages.append({"role": "assistant", "content": turn.text})
        if not turn.calls:
            break
        shown += turn.results[0].pictures
        messages += common.result_messages(turn, tool_format, MAX_RESULT_TOKENS)
        if not turn.results[0].error:
            digit = row["digits"][CORNERS.index(turn.calls[0].arguments["corner"])]
            messages.append({"role": "assistant", "content": answer_turn(draw(answer_shares, rng), digit, rng)})
            break
    return messages, shown


# -- Model --


def build_tokenizer(rng: random.Random) -> Any:
    """Byte-level BPE of at most 400 tokens. Digits stand alone; merges cross words, but never a corner's name."""
    texts = ["system\n", "user\n", "assistant\n", "<result>\n", "</result>", SYSTEM] * 200
    for _ in range(2000):
        for kind in ("good", "broken JSON"):
            texts += re.split(f"({'|'.join(CORNERS)})", call_turn(kind, rng.choice(CORNERS), rng))
        texts += ["Which digit is ", "?", answer_turn("good", 0, rng)]
    return common.train_tokenizer(texts, 400, CHAT_TEMPLATE, further_special=VISION_TOKENS.values())


def build_vision_model(tokenizer: Any, width: int = 128) -> VisionModel:
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in VISION_TOKENS.items()}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = {
        "vocab_size": len(tokenizer), "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 1024, "bos_token_id": None,
        "initializer_range": 0.06, "rms_norm_eps": 1e-6, **ends,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": 14, "in_channels": 3,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [1],
        "out_hidden_size": width, "initializer_range": 0.05,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    model = VisionModel(config).float()
    model.generation_config = GenerationConfig(do_sample=True, **ends)
    return model


def main() -> None:
    args = common.read_arguments(
        __doc__,
        common.TINY / "zoom-model",
        steps=200,
        threads=1,  # so small matrices gain nothing from 2
        mixed_steps={"type": int, "default": 60, "help": "with mistakes"},
        data={"action": "store_true", "help": "write pictures and questions into --data_dir, and end"},
        data_dir={"type": Path, "default": common.TINY / "zoom"},
        num_rows={"type": int, "help": "of the training split; the test split has 512"},
        scale={"type": int, "default": 1, "help": "pixels for one of the smallest pictures: for large models"},
    )
    if args.data:
        sizes = {**NUM_ROWS, **({"train": args.num_rows} if args.num_rows else {})}
        return write_data(args.data_dir, sizes, args.scale)
    rng = args.rng
    tokenizer = build_tokenizer(rng)
    model = build_vision_model(tokenizer)
    size = {"shortest_edge": 28 * 28, "longest_edge": LARGEST * LARGEST}
    processor = Qwen2VLImageProcessorPil(patch_size=14, temporal_patch_size=2, merge_size=2, size=size)
    processor.save_pretrained(args.output_dir)
    with_pictures(tokenizer, image_reader(str(args.output_dir), model.config, tokenizer))
    tool_format = TOOL_FORMATS["xml"](tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    rows = make_rows("warm start", 512)

    def example(*shares: Shares) -> Example:
        messages, _pictures = make_conversation(rng.choice(rows), tool_format, *shares, rng)
        return encode(messages, tool_format, TOOLS)  # INVARIANT: the pictures are held until their ids are made

    right, mixed = (partial(example, *shares) for shares in (RIGHT, (CALL_SHARES, ANSWER_SHARES)))
    common.warm_start_twice(model, tokenizer, right, mixed, args, RECIPE)


if __name__ == "__main__":
    main()

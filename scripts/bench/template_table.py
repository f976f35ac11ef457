"""What the chat templates that TRL ships do with conversations of several turns: the table of docs/tokenization.md.

    python scripts/bench/template_table.py            # the table
    python scripts/bench/template_table.py --write    # into docs/tokenization.md

Every template for inference (TRL's `*_training` ones are copies for training) is rendered with a small byte-level
tokenizer that has the control tokens of its text. No model is loaded. It takes seconds.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mt_grpo.conversation.formats.choose import TOOL_FORMATS, make_format

PAGE = Path("docs/tokenization.md")
BEGIN, END = "<!-- made by scripts/bench/template_table.py --write -->", "<!-- end of the table -->"
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TOKEN = re.compile(
    r"<[|｜][^<>{}'\"\s]+?[|｜]>|</?(?:bos|eos|start_of_turn|end_of_turn|s|think)>|\[/?[A-Z_]{2,}\]|<\|?turn\|?>"
)
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}  # fmt: skip
USER = {"role": "user", "content": "Q-one"}


def names() -> list[str]:
    """The templates for inference."""
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training"))


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """One token per byte, and the template's control tokens."""
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    found = dict.fromkeys(token for token in TOKEN.findall(template) if "think" not in token)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in found])
    ends = ("<|im_end|>", "<|eot_id|>", "<|return|>", "<turn|>", "<end_of_turn>", "<|end|>", "<｜end▁of▁sentence｜>")
    tokenizer.eos_token = next((token for token in ends if token in found), "</s>")
    tokenizer.chat_template = template
    return tokenizer


def rendered(tokenizer: PreTrainedTokenizerFast, messages: list, **kwargs) -> str | None:
    """The text; None where the template raises, or takes no content that is text."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
    except Exception:  # whatever a template raises
        return None


def of_tools(tokenizer: PreTrainedTokenizerFast) -> str:
    """What becomes of a conversation with a tool, its call and its result."""
    text = rendered(tokenizer, [USER], tools=[ADD], add_generation_prompt=True)
    shown = text is not None and "Adds." in text
    for arguments in ({"a": 41}, json.dumps({"a": 41})):
        call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": arguments}}
        messages = [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "R-one"},
            {"role": "assistant", "content": "A-one"},
        ]
        text = rendered(tokenizer, messages, tools=[ADD])
        if text is not None:
            break
    if text is None:
        return "raises"
    lost = [what for what, mark in (("the call", "41"), ("the result", "R-one")) if mark not in text]
    lost += [] if shown else ["the tools"]
    return "renders" if not lost else "ignores " + " and ".join(lost)


def of_thinking(tokenizer: PreTrainedTokenizerFast) -> str:
    """What becomes of the thinking of an earlier turn."""
    messages = [USER, {"role": "assistant", "content": "<think>\nT-one\n</think>\n\nA-one"}, USER]
    text = rendered(tokenizer, messages, add_generation_prompt=True)
    return "raises" if text is None else "kept" if "T-one" in text else "dropped"


def of_white_space(tokenizer: PreTrainedTokenizerFast) -> str:
    """What becomes of blanks around a turn's text."""
    text = rendered(tokenizer, [USER, {"role": "assistant", "content": " A-one \n\n"}, USER])
    return "raises" if text is None else "kept" if " A-one \n\n" in text else "cut"


def of_roles(tokenizer: PreTrainedTokenizerFast) -> str:
    """What becomes of two messages of the user in a row."""
    one, two = (rendered(tokenizer, messages) for messages in ([USER], [USER, {**USER, "content": "Q-two"}]))
    if two is None:
        return "raises"
    header = (one or "").partition("Q-one")[0][-8:]
    return "apart" if header and two.count(header) == one.count(header) + 1 else "merged"


def of_prompt(tokenizer: PreTrainedTokenizerFast) -> str:
    """Whether the generation prompt opens thinking."""
    text = rendered(tokenizer, [USER], add_generation_prompt=True)
    if text is None:
        return "raises"
    tail = text.rpartition("Q-one")[2]
    return "opens" if tail.count("<think>") > tail.count("</think>") else "closes" if "</think>" in tail else "no"


def of_formats(tokenizer: PreTrainedTokenizerFast) -> str:
    """The tool formats that take the template."""
    taken = []
    for name in TOOL_FORMATS:
        try:
            make_format(name, tokenizer)
            taken.append(f"`{name}`")
        except ValueError:
            pass
    return ", ".join(taken) or "none"


COLUMNS: dict[str, Callable[[PreTrainedTokenizerFast], str]] = {
    "a tool, its call and result": of_tools, "thinking of earlier turns": of_thinking,
    "blanks around a turn": of_white_space, "two user messages": of_roles,
    "generation prompt opens thinking": of_prompt, "`tool_format`": of_formats,
}  # fmt: skip


def table() -> str:
    """The section."""
    lines = ["| template | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name in names():
        tokenizer = tokenizer_of(name)
        lines.append(f"| `{name}` | " + " | ".join(column(tokenizer) for column in COLUMNS.values()) + " |")
    return "\n".join(lines) + "\n"


def with_table(page: str, made: str) -> str:
    """The page with this table in place of the one that it has."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n\n{made}\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"put it into {PAGE}")
    args = parser.parse_args()
    made = table()
    if args.write:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
    print(made)


if __name__ == "__main__":
    main()

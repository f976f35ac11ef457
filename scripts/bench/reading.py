"""How well a model reads a result when the search is made for it, on SQuAD's questions.

    python scripts/bench/reading.py                                   # the model as it comes
    python scripts/bench/reading.py --model runs/real_model/mt_grpo-steps20-seed1 --split train

In each conversation of hf_recipes/SmolLM2/squad-search.yaml the first turn is written for the model: a search with the
question as its query. The model reads the result and answers. A reward of the answer can be learned only as far as
some samples get it: this says before a training how many do, and what of the prompt changes that.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import evaluate
from build.squad_search import of_sentences, write_lines
from recipes import load_recipe
from transformers import AutoTokenizer

import mt_grpo_trainer as mt
from bench.common import VLLMServer, prepare
from bench.real_model import DATA, MODEL, RECIPE, SERVER, SERVER_ENV
from mt_grpo.rollout import Generation

# What a result is -> sentences of each of its parts (None: those of a whole passage, with its title), and its parts.
PROMPTS = {"a sentence, as in the recipe": (1, 1), "two sentences of any passages": (1, 2),
           "two sentences that follow each other": (2, 1), "a whole passage": (None, 1)}  # fmt: skip
SAMPLES = 4


class PerfectSearch(mt.VLLMServerClient):
    """A client that makes the first turn itself: a call of wiki_search with the question."""

    async def generate(
        self, prompt_ids: list[int], max_tokens: int, sampling_params: dict[str, Any] | None = None, index: int = 0
    ) -> Generation:
        read = self.tokenizer.decode(prompt_ids)
        _, _, asked = read.rpartition("<|im_start|>user\n")
        question, _, _ = asked.partition("<|im_end|>")
        if question.startswith("<result>"):
            return await super().generate(prompt_ids, max_tokens, sampling_params, index)
        call = json.dumps({"name": "wiki_search", "args": {"query": question.rstrip("?")}}, ensure_ascii=False)
        ids = self.tokenizer(f"<tool>{call}</tool><|im_end|>", add_special_tokens=False).input_ids
        return Generation(ids, [0.0] * len(ids), "stop")


def line(label: str, greedy: dict[str, Any], sampled: dict[str, Any]) -> str:
    """A row of the table."""
    numbers = [
        greedy["result_found"],
        greedy["exact_match"],
        2 * greedy["rewards"]["outcome"]["f1_reward_func"],
        sampled["exact_match"],
        sampled["pass_at_k"],
    ]
    return f"| {label} | {' | '.join(f'{number:.2f}' for number in numbers)} |"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="its folder")
    parser.add_argument("--split", default="test", help="test (default) or train")
    parser.add_argument("--num_problems", type=int, default=100)
    parser.add_argument("--prompts", nargs="+", default=list(PROMPTS), choices=list(PROMPTS))
    options = parser.parse_args(argv)
    prepare()
    print("| the result | answer in the result | greedy: exact | F1 | sampled: exact | best of four |")
    print("|---|---|---|---|---|---|")
    with VLLMServer(options.model, *SERVER, env=SERVER_ENV) as server, tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        for label in options.prompts:
            sentences, topk = PROMPTS[label]
            room = ["--max_tool_response_tokens", str(160 * topk), "--max_completion_length", str(224 + 160 * topk)]
            recipe = load_recipe(RECIPE, room)  # it sets the environment's variables, which are changed behind it
            passages = corpus = Path(DATA) / "passages.jsonl"
            if sentences:
                corpus = Path(folder) / f"{sentences}.jsonl"
                write_lines(corpus, of_sentences(list(map(json.loads, passages.open(encoding="utf-8"))), sentences))
            os.environ |= {"WIKI_SEARCH_CORPUS": str(corpus), "WIKI_SEARCH_TOPK": str(topk)}
            found = []
            for k, greedy in ((1, True), (SAMPLES, False)):
                client = PerfectSearch(base_url=server.url, tokenizer=tokenizer)
                try:
                    found.append(
                        evaluate.evaluate(
                            client,
                            recipe,
                            options.num_problems,
                            options.split,
                            k=k,
                            tokenizer=tokenizer,
                            progress=False,
                            greedy=greedy,
                        )
                    )
                finally:
                    client.close()
            print(line(label, *found), flush=True)


if __name__ == "__main__":
    main()

"""Rows and a corpus for a search task, of SQuAD's questions and the passages that answer them.

    python scripts/build/squad_search.py runs/squad                        # from the Hub: rajpurkar/squad_v2
    python scripts/build/squad_search.py runs/squad --source FOLDER        # of corpus.jsonl and qa.jsonl
    python scripts/build/squad_search.py runs/squad --sentences 1          # each sentence is a passage, without title
    python scripts/build/squad_search.py runs/squad --titles Normans "Southern California"

Writes into the folder:
- `corpus.jsonl`: a passage per line, with `id`, `title` and `text`, for `WIKI_SEARCH_CORPUS` of tools/wiki_search.py;
  with `--sentences N` each N sentences that follow each other, without a title (docs/real_model.md says why). Then
  `passages.jsonl` has the whole ones;
- `train.jsonl` and `test.jsonl`: a question per line, with `question`, `answer` (as TriviaQA has it) and `passage`,
  the id of the whole passage that was asked about where the source says so. A hash of the question holds out one in
  five, whatever else is in the data.

A folder has rows of `id`, `title`, `text`, and of `question`, `answer` (`{"value": ..., "aliases": [...]}`).
SQuAD 2.0 (Rajpurkar, Jia and Liang 2018) is under CC BY-SA 4.0; what is written here is too.
"""

import argparse
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mt_grpo.recipe.data import json_lines

HUB_DATASET = "rajpurkar/squad_v2"
HELD_OUT = 5  # one question in so many
# Behind a mark with two small letters, digits or closing signs before it: "St. Louis" and "U.S. Army" stay whole.
END_OF_SENTENCE = re.compile(r"""(?<=[a-z0-9)"\]]{2}[.?!])\s+(?=[A-Z"(])""")

Row = dict[str, Any]


def split_of(question: str) -> str:
    """The split of a question, the same in every data set."""
    return "test" if zlib.crc32(question.encode()) % HELD_OUT == 0 else "train"


def from_folder(folder: Path) -> tuple[list[Row], list[Row]]:
    """(passages, questions) of a folder with `corpus.jsonl` and `qa.jsonl`. Raises `ValueError`."""
    passages = list(map(json.loads, json_lines(folder / "corpus.jsonl", None)))
    if not all({"id", "title", "text"} <= row.keys() for row in passages):
        raise ValueError(f"{folder / 'corpus.jsonl'}: expected rows with id, title and text.")
    questions = [
        {"question": row["question"], "answer": row["answer"], **({"passage": row["id"]} if "id" in row else {})}
        for row in map(json.loads, json_lines(folder / "qa.jsonl", None))
    ]
    return passages, questions


def from_squad(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """(passages, questions) of rows as SQuAD has them: `title`, `context`, `question`, `answers`.

    A question that its passage does not answer is left out. A passage's id is its title and its number there."""
    passages: dict[str, Row] = {}
    counts: Counter[str] = Counter()
    questions = []
    for row in rows:
        title, text = row["title"].replace("_", " "), row["context"].strip()
        if text not in passages:
            passages[text] = {"id": f"{title}-{counts[title]}", "title": title, "text": text}
            counts[title] += 1
        if aliases := list(dict.fromkeys(row["answers"]["text"])):
            answer = {"value": aliases[0], "aliases": aliases}
            questions.append({"question": row["question"].strip(), "answer": answer, "passage": passages[text]["id"]})
    return list(passages.values()), questions


def of_titles(passages: list[Row], questions: list[Row], titles: list[str]) -> tuple[list[Row], list[Row]]:
    """The passages of these articles, and the questions about them.

    Raises `ValueError` for a title that is not there, and `KeyError` for a question that does not name its passage.
    """
    if missing := set(titles) - {passage["title"] for passage in passages}:
        raise ValueError(f"There is no article {sorted(missing)[0]!r}. Expected titles as they stand in the corpus.")
    kept = [passage for passage in passages if passage["title"] in titles]
    if len(kept) == len(passages):
        return kept, questions
    ids = {passage["id"] for passage in kept}
    return kept, [question for question in questions if question["passage"] in ids]


def of_sentences(passages: list[Row], count: int) -> list[Row]:
    """Each `count` sentences of a passage that follow each other, all of a shorter one. They have no title."""
    parts = []
    for passage in passages:
        sentences = END_OF_SENTENCE.split(passage["text"])
        for k in range(max(1, len(sentences) - count + 1)):
            text = " ".join(sentences[k : k + count])
            parts.append({"id": f"{passage['id']}.{k}", "title": "", "text": text})
    return parts


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path, help="a folder, which may be new")
    parser.add_argument("--source", type=Path, help="a folder with corpus.jsonl and qa.jsonl; default: the Hub")
    parser.add_argument("--sentences", type=int, help="a passage is so many sentences; default: it is whole")
    parser.add_argument("--titles", nargs="+", help="these articles; default: all")
    args = parser.parse_args(argv)
    try:
        passages, questions = from_hub() if args.source is None else from_folder(args.source)
        if args.titles is not None:
            passages, questions = of_titles(passages, questions, args.titles)
        if not questions:
            raise ValueError("There is no question. Expected at least one.")
        if args.sentences is not None and args.sentences < 1:
            raise ValueError(f"--sentences is {args.sentences}, expected 1 or more.")
    except (ValueError, OSError, KeyError) as error:
        sys.exit(f"error: {'a row of the questions has no ' if isinstance(error, KeyError) else ''}{error}")
    args.output_dir.mkdir(parents=True, exist_ok=True)

    def write(name: str, rows: list[Row]) -> None:
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (args.output_dir / f"{name}.jsonl").write_text(lines, encoding="utf-8")

    if args.sentences is not None:
        write("passages", passages)
        passages = of_sentences(passages, args.sentences)
    write("corpus", passages)
    unique = list({row["question"]: row for row in questions}.values())
    for split in ("train", "test"):
        rows = [row for row in unique if split_of(row["question"]) == split]
        write(split, rows)
        print(f"{split}: {len(rows)} questions")
    print(f"{len(passages)} passages; written into {args.output_dir}")


def from_hub() -> tuple[list[Row], list[Row]]:
    """(passages, questions) of both splits of SQuAD 2.0."""
    from datasets import load_dataset

    return from_squad(row for split in load_dataset(HUB_DATASET).values() for row in split)


if __name__ == "__main__":
    main()

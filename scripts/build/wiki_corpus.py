"""A corpus for tools/wiki_search.py: passages of about 100 words, from the pages that a data set of the Hub brings.

    python scripts/build/wiki_corpus.py data/wiki.jsonl                                     # TriviaQA's evidence
    python scripts/build/wiki_corpus.py data/hotpotqa.jsonl --dataset hotpotqa/hotpot_qa    # HotpotQA's paragraphs
    python scripts/build/wiki_corpus.py OUTPUT --dataset wikimedia/wikipedia --config 20231101.en --split train

Each line of the file has `id`, `title` and `text`. Of several pages with one title the first is kept. `--title` and
`--text` name columns, with a dot for what is inside one (`entity_pages.title`); a text may be a list of sentences.
Words are what spaces separate: pages in languages without spaces are not split. The data set is streamed to the file
`OUTPUT.part`, which gets its own name when it is whole. After a stop, the same command continues. Sizes: docs/tools.md
"""

import argparse
import contextlib
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCES = {  # data set, of which train and validation are read: its configuration, where titles are, where texts are
    "mandarjoshi/trivia_qa": ("rc.wikipedia", "entity_pages.title", "entity_pages.wiki_context"),
    "hotpotqa/hotpot_qa": ("distractor", "context.title", "context.sentences"),
}
WORDS = 100  # of a passage, which ends with the first sentence that brings it to four fifths of this
SAVE_SECONDS = 10.0  # between two lines of progress, each of which is a point to continue from


def passages_of(title: str, text: str) -> list[dict[str, str]]:
    """The passages of a page: whole sentences, except that none has more than 1.2 times `WORDS` words.

    >>> rows = passages_of("Six", "A sentence of six words here. " * 50 + "word " * 210)
    >>> [len(row["text"].split()) for row in rows], rows[1]["id"]
    ([84, 84, 84, 48, 100, 110], 'Six-1')
    """
    passages: list[list[str]] = [[]]
    for words in map(str.split, re.split(r"(?<=[.!?])\s+", text)):
        enough = 0.8 * WORDS if len(passages[-1] + words) <= 1.2 * WORDS else 0.2 * WORDS
        if len(passages[-1]) >= enough:
            passages.append([])
        passages[-1] += words
        while len(passages[-1]) > 1.2 * WORDS:
            passages[-1:] = [passages[-1][:WORDS], passages[-1][WORDS:]]
    if len(passages[-1]) < 0.2 * WORDS and len(sum(passages[-2:], [])) <= 1.2 * WORDS:  # too short to be found alone
        passages[-2:] = [sum(passages[-2:], [])]
    return [{"id": f"{title}-{k}", "title": title, "text": " ".join(words)} for k, words in enumerate(passages)]


def values_at(row: dict[str, Any], path: str) -> Any:
    """What a column holds, or `column.name` inside it: of a list of objects, or an object of lists. None at a null."""
    value: Any = row
    try:
        for name in path.split("."):
            value = [each and each[name] for each in value] if isinstance(value, list) else value and value[name]
    except (KeyError, TypeError):
        raise ValueError(f"there is no {path!r} (--title, --text). The columns are {', '.join(row)}.") from None
    return value


def pages_of(row: dict[str, Any], title: str, text: str) -> Iterator[tuple[str, str]]:
    """The (title, text) pairs of a row that have both. Raises `ValueError` if its columns hold no such texts."""
    titles, texts = values_at(row, title), values_at(row, text)
    lists = isinstance(titles, list) and isinstance(texts, list) and len(titles) == len(texts)
    for name, content in zip(titles, texts) if lists else [(titles, texts)]:
        sentences = content if isinstance(content, list) else [content]
        if None not in (name, content) and not all(isinstance(part, str) for part in (name, *sentences)):
            raise ValueError(f"{title!r} and {text!r} hold {name!r:.80} and {content!r:.80}. Expected texts.")
        if name and content and name.strip() and " ".join(sentences).strip():
            yield name.strip(), " ".join(sentences)


def rows_of(stream: Any) -> Iterator[dict[str, Any]]:
    """The rows of a streamed data set. Raises `OSError` if it cannot be read any further."""
    try:
        yield from stream
    except Exception as error:  # network, Hub and file errors have no common class
        raise OSError(f"reading stopped: {error!r}. Run the same command again to continue.") from error


def build(output: Path, name: str, config: str | None, splits: list[str], title: str, text: str) -> None:
    """Write the corpus, or the rest of one. Raises `ValueError`, `OSError` or `RuntimeError` with what is wrong."""
    from datasets import concatenate_datasets, load_dataset

    part, saved = Path(f"{output}.part"), Path(f"{output}.part.json")
    source = [name, config, splits, title, text]
    state: dict[str, Any] = {"of": source, "passages": 0, "bytes": 0, "seconds": 0.0, "position": None}
    if output.exists():
        raise ValueError(f"{output} exists. Delete it to make it again.")
    if size := part.stat().st_size if part.exists() else 0:  # else there is nothing to continue
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
            state |= json.loads(saved.read_text(encoding="utf-8"))
        if not state["position"] or state["of"] != source or state["bytes"] > size:
            raise ValueError(f"{part} is half of another corpus, or damaged, or {saved} is. Delete both.")
    stream = concatenate_datasets([load_dataset(name, config, split=each, streaming=True) for each in splits])
    stream.load_state_dict(state["position"] or stream.state_dict())
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "a+b") as file:
        file.truncate(state["bytes"])
        file.seek(0)
        titles, began = {json.loads(line)["title"] for line in file}, time.monotonic() - state["seconds"]

        def save() -> None:
            file.flush()
            state.update(bytes=file.tell(), seconds=time.monotonic() - began, position=stream.state_dict())
            Path(f"{saved}.new").write_text(json.dumps(state), encoding="utf-8")
            Path(f"{saved}.new").replace(saved)
            numbers = len(titles), state["passages"], state["bytes"] / 1e6, state["seconds"] / 60
            print("{:,} pages, {:,} passages, {:,.1f} MB, {:.1f} minutes".format(*numbers), flush=True)

        save()
        for row in rows_of(stream):
            for page, content in pages_of(row, title, text):
                lines = [] if page in titles else passages_of(page, content)
                titles.add(page)
                file.writelines(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)
                state["passages"] += len(lines)
            if time.monotonic() - began - state["seconds"] >= SAVE_SECONDS:
                save()
        save()
        if not titles:
            raise ValueError("there is no page with a title and a text.")
    part.replace(output)
    saved.unlink()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the file to write, such as data/wiki.jsonl")
    parser.add_argument("--dataset", default="mandarjoshi/trivia_qa", help="a name on the Hub, or a folder")
    parser.add_argument("--split", nargs="+", default=["train", "validation"], help="default: train and validation")
    for name in ("config", "title", "text"):
        parser.add_argument(f"--{name}", help="default: as the table SOURCES says")
    args = parser.parse_args(argv)
    defaults = SOURCES.get(args.dataset, (None, "title", "text"))
    config, *columns = (given or default for given, default in zip((args.config, args.title, args.text), defaults))
    try:
        build(args.output, args.dataset, config, args.split, *columns)
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: no corpus from {args.dataset}: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit("stopped. Run the same command again to continue.")
    print(f"{args.output} is written. Index it: WIKI_SEARCH_CORPUS={args.output} python tools/wiki_search.py history")


if __name__ == "__main__":
    main()

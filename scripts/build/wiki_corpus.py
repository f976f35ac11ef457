"""A corpus for tools/wiki_search.py: passages of about 100 words, from the pages that a data set of the Hub brings.

    python scripts/build/wiki_corpus.py data/wiki.jsonl                                     # TriviaQA's evidence
    python scripts/build/wiki_corpus.py data/hotpotqa.jsonl --dataset hotpotqa/hotpot_qa    # HotpotQA's paragraphs
    python scripts/build/wiki_corpus.py OUTPUT --dataset wikimedia/wikipedia --config 20231101.en --split train

Each line of the file has `id`, `title` and `text`. Of several pages with one title the first is kept. `--title` and
`--text` name columns, with a dot for what is inside one (`entity_pages.title`); a text may be a list of sentences.
The data set is streamed, so that only the corpus is written to the disk. It grows under the name `OUTPUT.part` and
gets its own name when it is whole. After a stop, the same command continues from the last line of progress.
TriviaQA's pages are 3.8 GB by the card of the data set, repeated ones included, and HotpotQA's paragraphs 0.6 GB.
Without the download, 112 MB of passages took 5 s on one core, and their index, of 190 MB, 6 s.
"""

import argparse
import fcntl
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCES = {  # data set: its configuration, where titles are, where texts are
    "mandarjoshi/trivia_qa": ("rc.wikipedia", "entity_pages.title", "entity_pages.wiki_context"),
    "hotpotqa/hotpot_qa": ("distractor", "context.title", "context.sentences"),
}
WORDS = 100  # of a passage, which ends with the first sentence that brings it to four fifths of this
SAVE_SECONDS = 10.0  # between two lines of progress, each of which is a point to continue from


def passages_of(title: str, text: str) -> list[dict[str, str]]:
    """The passages of a page, of whole sentences; one without an end for 1.5 passages is split between words.

    >>> rows = passages_of("Six", "A sentence of six words here. " * 50 + "word " * 210)
    >>> [len(row["text"].split()) for row in rows], rows[1]["id"]
    ([84, 84, 84, 100, 100, 58], 'Six-1')
    """
    passages: list[list[str]] = [[]]
    for sentence in re.split(r"(?<=[.!?])\s+", text):
        passages[-1] += sentence.split()
        while len(passages[-1]) > 1.5 * WORDS:
            passages[-1:] = [passages[-1][:WORDS], passages[-1][WORDS:]]
        if len(passages[-1]) >= 0.8 * WORDS:
            passages.append([])
    if len(passages[-1]) < 0.2 * WORDS and len(passages) > 1:  # too short to be found alone
        passages[-2:] = [passages[-2] + passages[-1]]
    return [{"id": f"{title}-{k}", "title": title, "text": " ".join(words)} for k, words in enumerate(passages)]


def values_at(row: dict[str, Any], path: str) -> Any:
    """What a column holds, or what `column.name` is inside it: of a list of objects, or of an object of lists."""
    value: Any = row
    try:
        for name in path.split("."):
            value = [each[name] for each in value] if isinstance(value, list) else value[name]
    except (KeyError, TypeError):
        raise ValueError(f"there is no {path!r} (--title, --text). The columns are {', '.join(row)}.") from None
    return value


def pages_of(row: dict[str, Any], title: str, text: str) -> Iterator[tuple[str, str]]:
    """The (title, text) pairs of a row that have both. Raises `ValueError` if its columns hold no such texts."""
    titles, texts = values_at(row, title), values_at(row, text)
    for name, content in zip(titles, texts, strict=True) if isinstance(titles, list) else [(titles, texts)]:
        content = " ".join(content) if isinstance(content, list) else content
        if not isinstance(name or "", str) or not isinstance(content or "", str):
            raise ValueError(f"{title!r} and {text!r} hold {name!r:.80} and {content!r:.80}. Expected texts.")
        if (name or "").strip() and (content or "").strip():
            yield name.strip(), content


def rows_of(stream: Any) -> Iterator[dict[str, Any]]:
    """The rows of a streamed data set. Raises `OSError` if it cannot be read any further."""
    try:
        yield from stream
    except Exception as error:  # network, Hub and file errors have no common class
        raise OSError(f"reading stopped: {error!r}. Run the same command again to continue.") from error


def build(output: Path, name: str, config: str | None, splits: list[str], title: str, text: str) -> None:
    """Write the corpus, or the rest of one. Raises `ValueError` or `OSError` with what is wrong."""
    from datasets import concatenate_datasets, load_dataset

    part, saved = Path(f"{output}.part"), Path(f"{output}.part.json")
    state = {"of": [name, config, splits, title, text], "pages": 0, "passages": 0, "bytes": 0, "seconds": 0.0}
    if output.exists():
        raise ValueError(f"{output} exists. Delete it to make it again.")
    if part.exists() and part.stat().st_size:
        source, state = state["of"], json.loads(saved.read_text()) if saved.exists() else {}
        if state.get("of") != source or part.stat().st_size < state["bytes"]:
            raise ValueError(f"{part} is half of another corpus, or damaged. Delete it to begin again.")
    stream = concatenate_datasets([load_dataset(name, config, split=split, streaming=True) for split in splits])
    if "position" in state:
        stream.load_state_dict(state["position"])
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises OSError if another process writes it
        file.truncate(state["bytes"])
        file.seek(0)
        titles = {json.loads(line)["title"] for line in file}
        began = time.monotonic() - state["seconds"]

        def save() -> None:
            file.flush()
            state.update(bytes=file.tell(), seconds=time.monotonic() - began, position=stream.state_dict())
            Path(f"{saved}.new").write_text(json.dumps(state), encoding="utf-8")
            Path(f"{saved}.new").replace(saved)
            line = "{pages:,} pages, {passages:,} passages, {0:,.1f} MB, {1:.1f} minutes"
            print(line.format(state["bytes"] / 1e6, state["seconds"] / 60, **state), flush=True)

        save()
        for row in rows_of(stream):
            for page, content in pages_of(row, title, text):
                if page not in titles:
                    titles.add(page)
                    lines = passages_of(page, content)
                    file.writelines(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)
                    state |= {"pages": state["pages"] + 1, "passages": state["passages"] + len(lines)}
            if time.monotonic() - began - state["seconds"] >= SAVE_SECONDS:
                save()
        save()
    if not state["pages"]:
        raise ValueError("there is no page with a title and a text.")
    part.replace(output)
    saved.unlink()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the file to write, such as data/wiki.jsonl")
    parser.add_argument("--dataset", default="mandarjoshi/trivia_qa", help="a name on the Hub, or a folder")
    parser.add_argument("--split", nargs="+", default=["train", "validation"])
    for name in ("config", "title", "text"):
        parser.add_argument(f"--{name}", help="default: as the table SOURCES says")
    args = parser.parse_args(argv)
    defaults = SOURCES.get(args.dataset, (None, "title", "text"))
    config, *columns = (given or default for given, default in zip((args.config, args.title, args.text), defaults))
    try:
        build(args.output, args.dataset, config, args.split, *columns)
    except (ValueError, OSError) as error:
        sys.exit(f"error: no corpus from {args.dataset}: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit("stopped. Run the same command again to continue.")
    print(f"{args.output} is written. Index it: WIKI_SEARCH_CORPUS={args.output} python tools/wiki_search.py history")


if __name__ == "__main__":
    main()

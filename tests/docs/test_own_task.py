"""docs/own_task.md: its blocks are the files of hf_recipes/SmolLM2/parcel, which do what it says, and its notebook."""

import ast
import json
import re
import runpy
import subprocess
import sys

import pytest
import yaml
from project import ROOT, json_lines

from mt_grpo import ToolCall, ToolResult, Turn, load_rewards

PAGE = (ROOT / "docs/own_task.md").read_text()
PARCEL = ROOT / "hf_recipes/SmolLM2/parcel"
NOTEBOOK = json.loads((ROOT / "docs/notebooks/own_task.ipynb").read_text())
tools = runpy.run_path(str(PARCEL / "tools.py"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parcel")
    subprocess.run([sys.executable, PARCEL / "data.py", folder], check=True, capture_output=True)
    return [json_lines(folder / f"{split}.jsonl") for split in ("train", "test")]


def test_blocks_and_cells_are_programs():
    texts = [path.read_text() for path in PARCEL.iterdir() if path.is_file()]
    for block in re.findall(r"^```(?:python|yaml)\n(.*?)^```$", PAGE, re.M | re.S):
        assert any(block in text for text in texts), block
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        ast.parse("".join(line for line in cell["source"] if not line.startswith("!")))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert not any(output["output_type"] == "error" for output in outputs)


def test_no_item_of_the_test_is_trained_and_no_example_is_asked(rows):
    items = [{row["question"].split(" send a ")[1].split(" to ")[0] for row in part} for part in rows]
    assert len(rows[0]) == 576 and len(rows[1]) == 144 and not items[0] & items[1]
    examples = yaml.safe_load((PARCEL / "examples.yaml").read_text())
    for example in examples:
        item, country = re.search(r"send a (\w+) to (\w+)\?", example[0]["content"]).groups()
        assert item not in tools["WEIGHTS"] and country not in tools["ZONES"]
    assert json.dumps({k: v for k, v in rows[0][0].items()}) in PAGE
    for row in rows[0][:20] + rows[1][:20]:
        item, country = row["question"][:-1].split(" send a ")[1].split(" to ")
        grams = tools["weigh"](item)
        assert (grams, tools["postage"](int(grams), country)) == (row["weight"], row["answer"])
    assert tools["postage"](1000, "Austria") == "6" and tools["postage"](1001, "Austria") == "7"
    for name, arguments in (("weigh", ["anvil"]), ("postage", [0, "Peru"]), ("postage", [1, "X"])):
        with pytest.raises(ValueError, match="no item|expected one of"):
            tools[name](*arguments)


def test_each_call_is_paid_once_for_its_own_part():
    (right_call,), (exact_match,) = load_rewards(str(PARCEL / "rewards.py"))

    def rollout(*texts, answer):
        turns = [Turn([], None, "", "stop", [ToolCall("x", {})], [ToolResult(text)]) for text in texts]
        return [*turns, Turn([], None, "", "stop", answer=answer)]

    rollouts = [
        rollout("940", "18", answer="18"),
        rollout("940", "940", "18", "18", answer="18"),  # repeated calls are paid once
        rollout("18", "940", answer="940"),  # the postage counts after the weight
        [],
    ]
    columns = {"weight": ["940"] * 4, "answer": ["18"] * 4}
    paid = right_call(rollout_turns=rollouts, **columns)
    assert paid == [[0.2, 0.4, None], [0.2, 0.0, 0.4, 0.0, None], [0.0, 0.2, None], []]
    assert exact_match(rollout_turns=rollouts, **columns) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_notebook_runs(tmp_path, monkeypatch):
    """With two steps and eight questions; the model is made if it is not there."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    book = nbformat.reads(json.dumps(NOTEBOOK), as_version=4)  # which joins the lines of a cell
    for name, value in {"STEPS": "2", "PROBLEMS": "8", "OUTPUT": str(tmp_path / "run")}.items():
        monkeypatch.setenv(name, value)
    resources = {"metadata": {"path": ROOT / "docs/notebooks"}}
    nbclient.NotebookClient(book, timeout=1200, resources=resources).execute()
    texts = [output.get("text", "") for cell in book.cells for output in cell.get("outputs", [])]
    assert re.search(r"exact match, held out, greedy: \d\.\d\d before, \d\.\d\d after", "".join(texts))

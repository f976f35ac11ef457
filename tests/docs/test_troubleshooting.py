"""docs/troubleshooting.md against the code: its texts are printed, its keys exist, no alarm is left out."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import transformers.trainer
import trl.trainer.grpo_trainer
import yaml
from test_docs import PAGES, RECIPES, first_column, section

import mt_grpo_trainer as mt
from mt_grpo.conversation.formats.choose import TOOL_FORMATS
from mt_grpo.recipe.keys import known_keys
from mt_grpo.reports.troubles import READINGS

ROOT = Path(__file__).resolve().parents[2]
PAGE = PAGES["docs/troubleshooting.md"]
SOURCES = [ROOT / "mt_grpo_trainer.py", *ROOT.glob("mt_grpo/**/*.py"), *ROOT.glob("scripts/**/*.py")]
ANY = "..."  # what differs from run to run
# Words in backticks that are no setting of a recipe: columns, functions, formats and values.
WORDS = {"async", "error", "reset", "respond", "get_reward", "nccl", "dtype", *TOOL_FORMATS}
OTHERS = {"...", "... [cut]", "<answer>", "<|im_end|>", "{tool_descriptions}", "kill -9", "vllm serve", "train.sh",
          "rolling out 37/64, 12 in tools", "rollouts.rank0.jsonl", "vllm_server.log", "sglang_server.log",
          "generation_config.json", "OUTPUT_DIR"}  # fmt: skip
COMMANDS = ("bash ", "python ", "pip ")  # tests/docs/test_docs.py has these


def text_of(node: ast.AST) -> str:
    """The text of an expression, with `...` for what is computed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"(?<!\{)\{[^{}]+\}(?!\})", ANY, node.value).replace("{{", "{").replace("}}", "}")
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else ANY for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return ANY


def printed() -> list[str]:
    """All texts of the code, and readings with what is printed in front of them."""
    kinds = (ast.Constant, ast.JoinedStr, ast.BinOp)
    nodes = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    return [" ".join(text_of(node).split()) for node in nodes] + READING_TEXTS


def filled(text: str) -> str:
    return text_of(ast.Constant(text))


READING_TEXTS = [f"{'Step ..., ' * each.of_logs}{each.name}: {filled(each.says)}" for each in READINGS]


def spans(text: str) -> list[str]:
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def quotes() -> list[str]:
    """What the page says is printed: behind **Says**, and in the first column of the last table."""
    says = re.findall(r"^- \*\*Says\*\*(.*?)(?=^- \*\*|^$)", PAGE, re.M | re.S)
    rows = [
        line.split("|")[1] for line in section(PAGE, "Refused at the start").splitlines() if line.startswith("| `")
    ]
    return [quote for text in says + rows for quote in spans(text) if " " in quote]


def pattern(quote: str) -> str:
    return ".*".join(re.escape(part) for part in quote.split(ANY))


def test_the_page_has_quotes():
    assert len(quotes()) > 60


@pytest.mark.parametrize("quote", quotes())
def test_a_quoted_text_is_printed(quote):
    assert len(re.findall(r"[a-z]", quote)) > 10 or quote == "... [cut]", "too short to mean something"
    assert any(re.search(pattern(quote), text) for text in PRINTED), quote


PRINTED = printed()


def test_a_text_that_is_not_printed_is_noticed():
    assert not any(re.search(pattern("no calls: ... of the rollouts call no tool"), text) for text in PRINTED)


@pytest.mark.parametrize("text", READING_TEXTS)
def test_every_reading_and_every_alarm_has_an_entry(text):
    assert any(re.match(pattern(quote), text) for quote in quotes()), text


def metrics() -> set[str]:
    """Those that are documented, which test_docs.py compares with a run, and those of TRL and transformers."""
    documented = set(first_column(RECIPES, "Metrics")) | set(
        re.findall(r"`((?:sync|completions)/\w+)`", section(RECIPES, "Metrics"))
    )
    logged = inspect.getsource(trl.trainer.grpo_trainer) + inspect.getsource(transformers.trainer)
    theirs = {name for name in ("entropy", "kl", "grad_norm", "step_time", "completions/max_length", "loss")
              if f'"{name}"' in logged}  # fmt: skip
    return documented | theirs


def test_every_name_of_the_page_exists():
    """Settings, metrics, flags and environment variables; what is none of these is listed above."""
    source = "\n".join(path.read_text() for path in [*SOURCES, *ROOT.glob("scripts/*.sh"), ROOT / "README.md"])
    keys, known_metrics, said = known_keys(mt.RECIPE_CLASSES), metrics(), set(quotes())
    for span in spans(PAGE):
        if span in said or span in OTHERS or span.startswith(COMMANDS):
            continue
        name = re.split(r"[ =:]", span.removeprefix("--"))[0]
        if span.startswith("--"):
            known = name in keys or f"--{name}" in source
        elif re.fullmatch(r"[A-Z][A-Z_]+", name):
            known = re.search(rf"\b{name}\b", source) is not None
        elif "/" in name and not name.endswith((".py", ".yaml")):
            known = name in known_metrics
        else:
            known = name in keys or name in known_metrics or name in WORDS
        assert known, f"{span}: no key, metric, flag or variable"


def test_values_of_settings_are_taken(tmp_path, monkeypatch):
    """`key: value` of the page, as a line of a recipe with a server, or of one without."""
    monkeypatch.chdir(ROOT)
    given = {span for span in spans(PAGE) if re.match(r"\w+: ", span) and span not in quotes()}
    assert len(given) > 10
    for span in given:
        for recipe in ("calculator-vllm", "calculator"):
            keys = yaml.safe_load((ROOT / f"hf_recipes/tiny/{recipe}.yaml").read_text()) | yaml.safe_load(span)
            (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(keys))
            try:
                mt.parse_arguments(["--config", str(tmp_path / "recipe.yaml")])
                break
            except ValueError as error:
                refused = error
        else:
            raise AssertionError(f"{span}: {refused}")

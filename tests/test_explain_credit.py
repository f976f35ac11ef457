"""explain_credit.py: a real group against the trainer's own tensors, and hand-written groups for text and page."""

import contextlib
import dataclasses
import doctest
import io
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import explain_credit as ex
import pytest
import torch
from explain_credit import GroupCredit, RolloutCredit, Token, TurnCredit
from transformers import AutoTokenizer

import mt_grpo_trainer as mt
from mt_grpo.data import make_arithmetic
from mt_grpo.rollout import Rollout, Turn

ROOT = Path(__file__).parent.parent
RECIPE = "hf_recipes/tiny/calculator.yaml"
EVIL = '</span><script>alert(1)</script><img src=x onerror="alert(2)">\'" &lt;b&gt; --> \x1b[31m\x00\u202e\ud800'


class Page(HTMLParser):
    """What a browser would find: the tags, their attributes, and the token spans of each card."""

    VOID = {"meta", "br", "img", "link"}

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.texts, self.cards, self.open, self.span = set(), set(), [], [], [], None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.add(tag)
        self.attributes |= attrs.keys()
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "article":
            self.cards.append([])
        if tag == "span" and "t" in attrs.get("class", "").split():
            colour = re.fullmatch(r"background: (#[0-9a-f]{6})", attrs["style"])[1] if "style" in attrs else None
            self.span = SimpleNamespace(
                text="", title=attrs["title"], classes=attrs["class"].split(), colour=colour, depth=len(self.open)
            )
            self.cards[-1].append(self.span)

    def handle_endtag(self, tag):
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-1:]}"
        if self.span and self.span.depth == len(self.open):
            self.span = None
        self.open.pop()

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)
        if self.span:
            self.span.text += data


def token(text="x", turn=0, advantage=0.0, trained=True, **more):
    return Token(7, text, turn, advantage, trained, **more)


def group(**changes):
    """Two rollouts: one called a tool, one did not."""
    called = RolloutCredit(
        stop_reason="answered",
        outcome=1.1,
        turn_reward=0.2,
        outcome_rewards=[("exact_match", 1.0), ("style", None)],
        turn_rewards=[("ran", 0.2), ("step (weight 2)", 0.25)],
        turns=[
            TurnCredit("<tool>{}\nthen</tool>", 3, 0.5, 2.0, "Error: no\nsuch tool", "call"),
            TurnCredit("<answer>4</answer>", 2, None, -0.5),
        ],
        tokens=[
            token("<tool>", advantage=2.0, logprob=-0.25), token("\n", advantage=2.0), token("</tool>", advantage=2.0),
            token("<|im_end|>", -1, 0.0, False, special=True), token("no", -1, 0.0, False),
            token("  ", 1, -0.5), token("\ufffd", 1, -0.5),
        ],
    )  # fmt: skip
    silent = RolloutCredit(
        "no_tool_call", 0.0, None, [("exact_match", 0.0)], [], [TurnCredit("4", 1, None, 0.0)], [token("4")]
    )
    whole = GroupCredit(
        "What is 2 + 2?", "4", {"credit_assignment": "mt_grpo"}, {"training row": "0"}, [called, silent], []
    )
    return dataclasses.replace(whole, **changes)


# --- a real group ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`main` on the bundled model: the trainer, what its step returned, the page and what was printed."""
    path, seen = tmp_path_factory.mktemp("page") / "new" / "credit.html", SimpleNamespace()
    build = mt.build_trainer

    def spy(*recipe):
        seen.trainer = build(*recipe)
        step = seen.trainer._generate_and_score_completions

        def record(inputs):
            seen.inputs, seen.output = inputs, step(inputs)
            return seen.output

        seen.trainer._generate_and_score_completions = record
        return seen.trainer

    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(ROOT)
        patch.setattr(mt, "build_trainer", spy)
        patch.setenv("COLUMNS", "110")
        ex.main(["--config", RECIPE, "--output", str(path), "--row", "0"])
    seen.printed, seen.page = printed.getvalue(), Page(path.read_text(encoding="utf-8"))
    return seen


def test_one_group_is_rolled_out_and_the_recipe_is_left_alone(run):
    assert [row["question"] for row in run.inputs] == ["What is 99 - 55 * 7?"] * 8
    assert len({tuple(rollout.prompt_ids) for rollout in run.trainer._rollouts}) == 1
    assert run.trainer._metrics["train"]["turns/mean"] and not run.trainer._metrics["eval"]
    folder = Path(run.trainer.args.output_dir)  # a temporary one, gone by now
    assert folder.name.startswith("explain-credit-") and not folder.exists()


def test_every_token_of_the_page_is_the_trainers(run):
    rollouts, advantages = run.trainer._rollouts, run.output["advantages"]
    assert any(-1 in rollout.turn_ids for rollout in rollouts)  # else nothing below is about the environment
    assert (advantages > 0).any() and (advantages < 0).any()
    assert [len(card) for card in run.page.cards] == [len(rollout.completion_ids) for rollout in rollouts]
    for i, (rollout, card) in enumerate(zip(rollouts, run.page.cards, strict=True)):
        assert [int(re.match(r"token (\d+), ", span.title)[1]) for span in card] == rollout.completion_ids
        assert [k for k, span in enumerate(card) if "out" in span.classes] == [
            k for k, turn in enumerate(rollout.turn_ids) if turn == -1
        ]
        for k, (turn, span) in enumerate(zip(rollout.turn_ids, card, strict=True)):
            if turn == -1:
                assert span.title.endswith(", environment, out of the loss") and span.colour is None
            else:
                shown = re.search(rf", turn {turn}, advantage ([+-]?\d+\.\d{{4}})$", span.title)
                assert float(shown[1]) == pytest.approx(advantages[i, k].item(), abs=6e-5)
        strongest = advantages[i].abs().argmax()
        if advantages[i, strongest].abs() == advantages.abs().max():
            assert card[strongest].colour == ("#4596d1" if advantages[i, strongest] > 0 else "#e8743b")
    colours = [span.colour for card in run.page.cards for span in card]
    marks = {span.text: "special" in span.classes for card in run.page.cards for span in card}
    assert marks["<|im_start|>"] and marks["<|im_end|>"] and not marks["<"]
    assert {"#4596d1", "#e8743b"} & set(colours)  # the scale ends at the group's largest advantage


def test_the_text_has_every_turn_with_its_advantage(run):
    lines = run.printed.splitlines()
    assert lines[:3] == [
        "question       What is 99 - 55 * 7?",
        "gold answer    -286",
        "credit         credit_assignment mt_grpo, turn_advantage_coef 1, scale_rewards group",
    ]
    assert "\x1b" not in run.printed and max(map(len, lines)) <= 110
    turns = [re.fullmatch(r" +(\d+) +(\S+) +([+-]?\d+\.\d\d)  (.*)", line) for line in lines]
    turns = [(int(m[1]), m[2], float(m[3])) for m in turns if m]
    expected = []
    for i, rollout in enumerate(run.trainer._rollouts):
        assert f"rollout {i}  {rollout.stop_reason}" in lines
        for k in range(len(rollout.turns)):
            advantage = run.output["advantages"][i, rollout.turn_ids.index(k)].item()
            expected.append((k, "-", pytest.approx(advantage, abs=6e-3)))
    assert turns == expected
    observations = [turn.observation for rollout in run.trainer._rollouts for turn in rollout.turns]
    assert run.printed.count("-> ") == sum(text is not None for text in observations) > 0
    assert "exact_match_reward_func 1.00" in run.printed


def test_rows_and_settings_can_be_chosen(monkeypatch):
    monkeypatch.chdir(ROOT)
    shown = ex.explain(RECIPE, 3, ["--credit_assignment", "outcome", "--num_generations=4", "--outcome_reward_weights",
                                   "1", "2"])  # fmt: skip
    row = make_arithmetic(4, seed=0)[3]
    assert (shown.question, shown.answer) == (row["question"], row["answer"])
    assert shown.sampling["training row"] == "3"
    assert shown.credit["credit_assignment"] == "outcome" and len(shown.rollouts) == 4
    for rollout in shown.rollouts:
        assert len({turn.advantage for turn in rollout.turns}) == 1  # outcome only: turns are not told apart
        (_, exact), (name, given) = rollout.outcome_rewards
        assert name == "answer_given_reward_func (weight 2)"
        assert rollout.outcome == pytest.approx(exact + 2 * given)
        assert rollout.turn_reward == pytest.approx(sum(reward for _, reward in rollout.turn_rewards))
    assert max(rollout.turn_reward for rollout in shown.rollouts) > 0


def test_turn_rewards_that_are_given_per_turn_are_shown_with_their_turn(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    (tmp_path / "rewards.py").write_text(
        "def odd(rollout_turns, **kwargs):\n"
        "    return [[None if k % 2 else 0.25 + i for k, _ in enumerate(t)] for i, t in enumerate(rollout_turns)]\n"
        "TURN_REWARD_FUNCS = [odd]\n"
    )
    shown = ex.explain(RECIPE, 0, ["--reward_fn", str(tmp_path / "rewards.py"), "--turn_reward_weights", "2"])
    assert max(len(rollout.turns) for rollout in shown.rollouts) > 1
    for i, rollout in enumerate(shown.rollouts):
        assert [turn.reward for turn in rollout.turns] == [
            None if k % 2 else 0.5 + 2 * i for k in range(len(rollout.turns))
        ]
        assert rollout.turn_reward is None
        assert "to its turns" in dict(ex.reward_lines(rollout))["turn rewards"]


def test_masked_rollouts_are_shown_as_out_of_the_loss(monkeypatch):
    monkeypatch.chdir(ROOT)
    shown = ex.explain(RECIPE, 0, ["--mask_truncated_completions", "true", "--max_completion_length", "3"])
    assert {rollout.stop_reason for rollout in shown.rollouts} == {"max_tokens"}
    spans = [span for card in Page(ex.render_html(shown)).cards for span in card]
    assert len(spans) == 3 * 8 and all("out" in span.classes and span.colour is None for span in spans)
    assert [turn.advantage for rollout in shown.rollouts for turn in rollout.turns] == [None] * 8
    assert [note for note in shown.notes if "mask_truncated_completions" in note] and len(shown.notes) == 1


# --- settings and errors ---------------------------------------------------------------------------------------------


RECIPES = sorted(path for path in ROOT.glob("hf_recipes/*/*.yaml") if path.parent.name != "accelerate")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_one_group_is_one_batch_of_any_recipe(recipe, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", dict(os.environ))  # a recipe's `env` must not reach other tests
    _, args, _ = ex.group_recipe(str(recipe), [], str(tmp_path))
    sizes = (args.per_device_train_batch_size, args.generation_batch_size, args.steps_per_generation)
    assert sizes == (args.num_generations, args.num_generations, 1)
    assert (args.gradient_accumulation_steps, args.report_to, args.output_dir) == (1, [], str(tmp_path))


@pytest.mark.parametrize("size", ["generation_batch_size: 32", "steps_per_generation: 2"])
def test_a_recipe_that_writes_evaluates_and_pushes_does_none_of_it(size, monkeypatch, tmp_path):
    lines = (ROOT / RECIPE).read_text().replace('save_strategy: "no"', "save_strategy: steps").splitlines()
    lines = [line for line in lines if not line.startswith("per_device_train_batch_size")]
    lines += [
        size, "per_device_train_batch_size: 16", "eval_strategy: steps", "eval_steps: 10", "save_steps: 10",
        "eval_dataset_size: 8", "load_best_model_at_end: true", "push_to_hub: true", "log_completions: true",
    ]  # fmt: skip
    (tmp_path / "recipe.yaml").write_text("\n".join(lines))
    mt.parse_arguments(["--config", str(tmp_path / "recipe.yaml")])  # trains as it stands
    script_args, args, _ = ex.group_recipe(str(tmp_path / "recipe.yaml"), [], str(tmp_path / "elsewhere"))
    assert (args.generation_batch_size, args.steps_per_generation, args.num_generations) == (8, 1, 8)
    assert (args.eval_strategy, args.save_strategy, script_args.eval_dataset_size) == ("no", "no", None)
    assert not (args.push_to_hub or args.load_best_model_at_end or args.log_completions or args.log_rollouts)
    assert args.output_dir == str(tmp_path / "elsewhere")


@pytest.mark.parametrize("arguments, message", [
    (["--config", "missing.yaml"], "cannot be read"),
    (["--config", RECIPE, "--row", "2048"], r"--row 2048: the training set has 2048 rows. Expected 0 to 2047"),
    (["--config", RECIPE, "--row", "-1"], "Expected 0 to 2047"),
    (["--config", RECIPE, "--temprature", "1"], "Did you mean 'temperature'"),
    (["--config", RECIPE, "--credit_assignment", "magic"], "'magic' is not known"),
    (["--config", RECIPE, "--output_dir", "x"], "--output_dir has no effect here"),
    (["--config", RECIPE, "--per-device-train-batch-size=4"], "--per_device_train_batch_size has no effect here"),
    (["--config", RECIPE, "--num_generations", "1"], "num_generations=1, expected"),
])  # fmt: skip
def test_wrong_arguments_are_explained(arguments, message, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match=message):
        ex.main([*arguments, "--output", str(tmp_path / "page.html")])
    assert not list(tmp_path.iterdir())


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="WORLD_SIZE=2, expected one process"):
        ex.main(["--config", RECIPE])


def test_help_shows_a_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        ex.main(["--help"])
    assert f"python scripts/explain_credit.py --config {RECIPE}" in capsys.readouterr().out


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_tokens_are_the_rows_of_the_trainers_tensors(random_model):
    tokenizer = AutoTokenizer.from_pretrained(random_model)
    ids = tokenizer("é", add_special_tokens=False)["input_ids"]
    assert len(ids) == 2  # bytes, neither of which is a character
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    turns = [Turn(ids, [-0.5, None], "é", "stop", observation_ids=[end, *newline]),
             Turn([5], [float("nan")], "&", "stop")]  # fmt: skip
    output = {
        "completion_ids": torch.tensor([[0] * 6, [*ids, end, *newline, 5, 99]]),
        "completion_mask": torch.tensor([[1] * 6, [1, 1, 1, 1, 1, 0]]),
        "tool_mask": torch.tensor([[1] * 6, [1, 1, 0, 0, 1, 1]]),
        "advantages": torch.tensor([[9.0] * 6, [1.5, 1.5, 0.0, 0.0, -2.0, 0.0]]),
    }
    assert ex.collect_tokens(Rollout([], [], turns=turns), output, 1, tokenizer) == [
        Token(ids[0], "\ufffd", 0, 1.5, True, -0.5, False),
        Token(ids[1], "\ufffd", 0, 1.5, True, None, False),
        Token(end, "<|im_end|>", -1, 0.0, False, None, True),
        Token(newline[0], "\n", -1, 0.0, False, None, False),
        Token(5, tokenizer.decode([5]), 1, -2.0, True, None, False),
    ]


def test_a_space_that_decoding_drops_comes_back():
    pieces = {1: "\u2581the", 2: "the", 3: None}
    tokenizer = SimpleNamespace(
        decode=lambda ids, **_: {1: "the", 2: "the", 3: "?"}[ids[0]], convert_ids_to_tokens=pieces.get
    )
    assert [ex.token_text(tokenizer, i) for i in (1, 2, 3)] == [" the", "the", "?"]


# --- text ------------------------------------------------------------------------------------------------------------


def test_the_text_of_a_group():
    assert ex.render_text(group(notes=["Mind this."]), width=60).splitlines() == [
        "question       What is 2 + 2?",
        "gold answer    4",
        "credit         credit_assignment mt_grpo",
        "rollouts from  training row 0",
        "note           Mind this.",
        "",
        "turn  reward  advantage  text, and what the environment answered",
        "",
        "rollout 0  answered",
        "      outcome      1.10 = exact_match 1.00, style -",
        "      turn rewards ran 0.20, step (weight 2) 0.25; 0.20 to",
        "                   the rollout, 0.50 to its turns",
        "   0    0.50      +2.00  <tool>{}↵then</tool>",
        "                         -> call error: Error: no↵such tool",
        "   1       -      -0.50  <answer>4</answer>",
        "",
        "rollout 1  no_tool_call",
        "      outcome      0.00 = exact_match 0.00",
        "   0       -       0.00  4",
    ]


def test_long_texts_are_cut_to_the_terminal():
    first, second = group().rollouts
    long = dataclasses.replace(first, turns=[TurnCredit("w" * 500, 500, None, 1.0, "o" * 500)])
    lines = ex.render_text(group(question="why " * 100, rollouts=[long, second]), width=80).splitlines()
    assert max(map(len, lines)) == 80
    assert [line for line in lines if "ww" in line] == ["   0       -      +1.00  " + "w" * 54 + "…"]
    assert sum(line.count("why") for line in lines) == 100  # the question is wrapped, not cut


def test_colour_is_asked_for_and_model_text_cannot_bring_its_own():
    first, second = group().rollouts
    evil = dataclasses.replace(first, turns=[TurnCredit(EVIL, 1, None, 1.0, EVIL), TurnCredit("", 1, None, -1.0)])
    shown = group(question=EVIL, answer=EVIL, rollouts=[evil, second])
    plain, coloured = ex.render_text(shown, 300), ex.render_text(shown, 300, colour=True)
    assert not set("\x1b\x00\u202e\ud800") & set(plain) and "␛[31m␀⟨U+202E⟩⟨U+D800⟩" in plain
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    assert "\x1b[1;38;5;32m    +1.00\x1b[0m" in coloured and "\x1b[1;38;5;166m    -1.00\x1b[0m" in coloured


# --- page ------------------------------------------------------------------------------------------------------------


def test_the_tokens_of_a_page():
    first, second = Page(ex.render_html(group())).cards
    assert [(span.text, span.colour, span.classes) for span in first] == [
        ("<tool>", "#4596d1", ["t"]), ("↵\n", "#4596d1", ["t"]), ("</tool>", "#4596d1", ["t"]),
        ("<|im_end|>", None, ["t", "out", "special"]), ("no", None, ["t", "out"]),
        # A quarter of the way from white to vermilion: 255 - 23/4, 255 - 139/4, 255 - 196/4.
        ("··", "#f9dcce", ["t"]), ("\ufffd", "#f9dcce", ["t"]),
    ]  # fmt: skip
    assert [span.title for span in first][:4] == [
        "token 7, turn 0, advantage +2.0000, logprob -0.2500", "token 7, turn 0, advantage +2.0000",
        "token 7, turn 0, advantage +2.0000", "token 7, environment, out of the loss",
    ]  # fmt: skip
    assert [(span.text, span.colour) for span in second] == [("4", "#ffffff")]


def test_the_page_says_what_the_rollouts_got():
    text = " ".join(Page(ex.render_html(group(notes=["Mind this."]))).texts)
    for part in ("What is 2 + 2?", "credit_assignment mt_grpo", "Mind this.", "1.10 = exact_match 1.00, style -",
                 "no_tool_call", "0.20 to the rollout, 0.50 to its turns", "-2.00 0.00 +2.00"):  # fmt: skip
        assert part in text
    cells = re.findall(r"<td>(?:<span[^>]*>)?([^<]*)", ex.render_html(group()))
    assert cells == ["0", "3", "0.50", "+2.00", "call", "1", "2", "-", "-0.50", "", "0", "1", "-", "0.00", ""]


def test_model_text_stays_text():
    evil = RolloutCredit(
        EVIL, 1.0, None, [(EVIL, 1.0)], [(EVIL, None)], [TurnCredit(EVIL, 1, None, 1.0, EVIL, EVIL)],
        [token(EVIL, advantage=1.0), token(EVIL, -1, 0.0, False, special=True), token("<script>", advantage=1.0)],
    )  # fmt: skip
    page = ex.render_html(GroupCredit(EVIL, EVIL, {EVIL: EVIL}, {"model": EVIL}, [evil], [EVIL]))
    found = Page(page)
    assert found.open == []
    assert found.tags == {"html", "head", "meta", "title", "style", "body", "header", "main", "p", "h1", "h2", "dl",
                          "dt", "dd", "div", "i", "b", "br", "article", "span", "small", "table", "tr", "th",
                          "td"}  # fmt: skip
    assert found.attributes == {"lang", "charset", "http-equiv", "content", "name", "class", "style", "title"}
    shown = EVIL.replace("\x1b", "␛").replace("\x00", "␀").replace("\u202e", "⟨U+202E⟩").replace("\ud800", "⟨U+D800⟩")
    assert [span.text for span in found.cards[0]] == [shown, shown, "<script>"]
    # Question, answer, setting (twice), model, note, stop reason, two functions, error, two tokens.
    assert sum(text.count(shown) for text in found.texts) == 12
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page
    page.encode("utf-8")


def test_the_page_loads_and_runs_nothing():
    page = ex.render_html(group())
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    assert page.index("Content-Security-Policy") < page.index("<style>")
    assert not re.search(r"https?:|url\(|@import|<script|<link|\bsrc=|\bhref=", page)


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("advantage, scale, colour", [
    (3.0, 3.0, "#4596d1"), (-3.0, 3.0, "#e8743b"), (0.0, 3.0, "#ffffff"), (-0.0, 3.0, "#ffffff"),
    (1.5, 3.0, "#a2cae8"), (0.0, 0.0, "#ffffff"), (3.1, 3.0, "#4596d1"),
])  # fmt: skip
def test_colours(advantage, scale, colour):
    assert ex.colour_of(advantage, scale) == colour


def test_text_can_be_read_on_every_colour():
    """WCAG AA asks for 4.5 to 1; the ink of tokens is #111, that of the environment #696969 on #f1f1f1."""
    for step in range(-100, 101):
        assert (luminance(ex.colour_of(step, 100)) + 0.05) / (luminance("#111111") + 0.05) > 5.5
    assert ".t { " in ex.STYLE and "color: #111; }" in ex.STYLE
    assert ".out { background: #f1f1f1; color: #696969; text-decoration: line-through" in ex.STYLE
    assert (luminance("#f1f1f1") + 0.05) / (luminance("#696969") + 0.05) > 4.5


def test_the_scale_is_that_of_trained_tokens():
    first, second = group().rollouts
    assert group().scale == 2.0
    masked = dataclasses.replace(first, tokens=[token(advantage=-9.0, trained=False), token(advantage=-0.5)])
    assert group(rollouts=[masked, second]).scale == 0.5
    assert group(rollouts=[]).scale == 0.0


@pytest.mark.parametrize("tokens, scale_rewards, words", [
    ([token(advantage=1.0), token("r", -1, 0.0, False)], "group", []),
    ([token(advantage=0.0)], "group", ["Every advantage is 0"]),
    ([token(advantage=1.0)], "batch", ["scale_rewards batch"]),
    ([token(advantage=1.0, trained=False)], "none", ["Truncated rollouts"]),
])  # fmt: skip
def test_notes(tokens, scale_rewards, words):
    rollout = dataclasses.replace(group().rollouts[0], tokens=tokens)
    found = ex.notes([rollout], {"scale_rewards": scale_rewards})
    assert len(found) == len(words) and all(note.startswith(word) for note, word in zip(found, words))


def test_the_examples_of_the_docstrings():
    failed, tried = doctest.testmod(ex)
    assert failed == 0 and tried > 5

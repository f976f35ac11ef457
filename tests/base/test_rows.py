"""Rows of data reach prompts, environments and rewards as they were written."""

import json
import random
import tracemalloc

import pytest
from datasets import Dataset, Features, Image, Value
from test_trainer import length_reward, make_trainer, settings
from transformers import AutoTokenizer

import mt_grpo.recipe.data
from mt_grpo.base.rows import Rows
from mt_grpo.recipe.checks import check_dataset, check_images, longest_prompt
from mt_grpo.recipe.data import load_rows
from mt_grpo.run.checkpoints import dataset_sha256
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv


def written(path, rows):
    """A file of these rows, or of these lines."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


class Keeps:
    """Keeps what `reset` got, as text, and takes all out of the row: no reward and no other rollout may see that."""

    got: list = []

    def reset(self, **row):
        Keeps.got.append(json.dumps(row))
        said = None if row.get("prompt") else [{"role": "user", "content": f"Row {row['id']}."}]
        for value in row.values():
            for part in value if isinstance(value, list) else []:
                if isinstance(part, (dict, list)):
                    part.clear()
            if isinstance(value, (dict, list)):
                value.clear()
        return said

    def get_reward(self) -> float:
        return len(Keeps.got) % 3 / 3


def roll_out(model, folder, data, evaluates=False, **changes):
    """What `reset` got, what the reward got, and what the model read, of one batch with all rows, twice each."""
    seen, Keeps.got = {}, []

    def reward(prompts, **kwargs):
        names = "completions completion_ids rollout_turns environments environment_rewards trainer_state log_extra"
        given = {key: value for key, value in kwargs.items() if key not in [*names.split(), "log_metric"]}
        seen.update(prompts=prompts, columns=given)
        return [float(i % 2) for i in range(len(prompts))]

    args = settings(folder, per_device_train_batch_size=2 * len(data), num_generations=2, max_completion_length=8)
    args |= {"per_device_eval_batch_size": 2 * len(data), "shuffle_dataset": False}
    env = MultiTurnToolEnv([], None, environment=Keeps, tool_format=changes.pop("tool_format", "xml"))
    trainer = MTGRPOEnvTrainer(
        model, env, [], [reward], args=MTGRPOConfig(**args, tool_format=env.tool_format), train_dataset=data,
        eval_dataset=data if evaluates else None,
    )  # fmt: skip
    if evaluates:
        trainer.evaluate()
    else:
        trainer.model.train()
        trainer._generate_and_score_completions([data[i // 2] for i in range(2 * len(data))])
    return Keeps.got, seen, trainer


# --- A row is what its JSON says -------------------------------------------------------------------------------------


def draw(rng, depth=0):
    """Any value that JSON has."""
    kind = rng.randrange(9 if depth < 3 else 7)
    if kind == 7:
        return [draw(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 8:
        return {rng.choice(["a", "b", "c", "Grüße", ""]): draw(rng, depth + 1) for _ in range(rng.randrange(4))}
    return [
        None, rng.random() < 0.5, rng.randrange(-5, 6), rng.choice([10**30, -(2**63) - 1, 2**53 + 1]),
        rng.choice([0.1, 1.0, -0.0, 1e-7, 1e300]), rng.choice(["", "x", "1", "null", "日本 🎲 \u2028", "\ud83d"]),
        "text",
    ][kind]  # fmt: skip


def draw_row(rng, number):
    """A row with some columns of eight, of any types, and a prompt in one of the known forms, or none."""
    columns = [f"c{i}" for i in range(8)]
    row = {name: draw(rng) for name in rng.sample(columns, rng.randrange(9))} | {"id": number}
    given, extra = (json.loads(json.dumps(draw(rng)).replace(r"\ud83d", "?")) for _ in range(2))  # the model reads it
    call = {"type": "function", "function": {"name": "f", "arguments": {rng.choice("abc"): given}}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    forms = [
        {}, {"prompt": None}, {"prompt": "Go."}, {"question": "What?", "answer": draw(rng) or 0},
        {"prompt": [*messages, {"role": "user", "content": str(number), "extra": extra}]},
    ]  # fmt: skip
    items = [*row.items(), *rng.choice(forms).items()]
    rng.shuffle(items)
    return dict(items)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_any_row_arrives_as_it_was_written(random_model, tmp_path, seed, evaluates):
    """Byte for byte of `json.dumps`: environments get the row's keys and no other, rewards None for a missing one."""
    rng = random.Random(seed)
    rows = [draw_row(rng, number) for number in range(12)]
    path = written(tmp_path / "rows.jsonl", [json.dumps(row) for row in rows])
    data = load_rows(path, "train", needs_prompt=False)
    got, seen, _ = roll_out(random_model, tmp_path / "out", data, evaluates)
    order = seen["columns"]["id"]  # the sampler shuffles test rows
    assert sorted(order) == [i // 2 for i in range(24)] and (evaluates or order == sorted(order))
    prompts = [
        [{"role": "user", "content": "Go."}] if row.get("prompt") == "Go."
        else [{"role": "user", "content": "What?"}] if "question" in row
        else row.get("prompt")
        for row in rows
    ]  # fmt: skip
    expected = [
        {**row, **({"prompt": prompt} if "prompt" in row or "question" in row else {})}
        for row, prompt in zip(rows, prompts)
    ]
    assert sorted(got) == sorted(json.dumps(row) for row in expected for _ in range(2))
    names = {key for row in rows for key in row} - {"prompt"}
    assert seen["columns"].keys() == names
    for name in names:
        assert json.dumps(seen["columns"][name]) == json.dumps([rows[i].get(name) for i in order])
    asked = [prompts[i] or [{"role": "user", "content": f"Row {i}."}] for i in order]
    for got_prompt, asked_prompt in zip(seen["prompts"], asked, strict=True):
        assert json.dumps(got_prompt) == json.dumps(asked_prompt)


def test_a_column_that_no_row_of_a_batch_has_is_none_for_rewards(random_model, tmp_path):
    """A reward names it without a default: other rows of the data have it."""

    def reward(completions, hint, **kwargs):
        return [float(each is None) for each in hint]

    rows = [{"prompt": "a", "hint": "x"}, {"prompt": "b"}]
    data = load_rows(written(tmp_path / "rows.jsonl", rows), "train")
    args = MTGRPOConfig(**settings(tmp_path / "out"))
    env = MultiTurnToolEnv([], None)
    trainer = MTGRPOEnvTrainer(random_model, env, [], [reward], args=args, train_dataset=data)
    trainer.model.train()
    trainer._generate_and_score_completions([data[1]] * 8)
    assert trainer.batch.logged.tolist() == [[1.0]] * 8


def test_an_environment_changes_no_row_but_its_own(random_model):
    """As `evaluate` begins samples of one problem, which are of the same row."""
    row = {"prompt": "?", "board": {"stones": [1, 2]}}
    tokenizer = AutoTokenizer.from_pretrained(random_model)
    env = MultiTurnToolEnv([], None, environment=Keeps, tool_format="xml", tokenizer=tokenizer)
    first, second = env.start([row["prompt"]] * 2, rows=[row, row])
    first.row["board"]["stones"].pop()
    assert second.row == row == {"prompt": "?", "board": {"stones": [1, 2]}}


def test_the_longest_prompt_is_looked_for_in_all_rows(random_model):
    """Only the prompts of most characters are tokenized: it is among them wherever it stands."""
    rows = [{"prompt": [{"role": "user", "content": "?" * (99 if i == 40 else 1)}]} for i in range(80)]
    env = MultiTurnToolEnv([], None, tokenizer=AutoTokenizer.from_pretrained(random_model))
    longest = longest_prompt(env, Rows(rows))
    assert longest == len(env.prompt_ids(rows[40]["prompt"], env.tokenizer))
    assert longest > len(env.prompt_ids(rows[0]["prompt"], env.tokenizer))


def test_rows_are_read_as_those_of_a_data_set(tmp_path):
    """Empty lines are no rows."""
    rows = [{"prompt": str(i), **({"n": i} if i % 2 else {})} for i in range(6)]
    lines = [line for row in rows for line in ("", json.dumps(row))]
    data = load_rows(written(tmp_path / "rows.jsonl", lines), "train", size=5)
    assert (len(data), data.column_names, data["n"]) == (5, ["prompt", "n"], [None, 1, None, 3, None])
    assert data[-2]["n"] == 3
    for key, error in ((5, IndexError), (-6, IndexError), ("m", KeyError)):
        with pytest.raises(error):
            data[key]


# --- No column is changed --------------------------------------------------------------------------------------------

SOLUTION = "She earns 18 * 100 dollars.\n#### 1,800"


def test_a_data_set_in_python_is_used_untouched(random_model, tmp_path):
    """The same object, its columns as they are: the rewards get what Arrow makes of them."""
    prompts = [[{"role": "user", "content": str(i)}] for i in range(6)]
    table = Dataset.from_list([{"prompt": prompt, "answer": SOLUTION} for prompt in prompts])
    trainer = make_trainer(random_model, tmp_path, eval_dataset={"a": table, "b": table.select([0])})
    trainer.train_dataset, held = table, trainer.train_dataset
    assert isinstance(held, Dataset)
    seen = []
    trainer.reward_funcs[1] = lambda completions, answer, **kwargs: seen.extend(answer) or [0.0] * len(completions)
    trainer.reward_funcs[1].__name__ = "outcome"
    trainer.model.train()
    trainer._generate_and_score_completions([table[0]] * 8)
    assert seen == [SOLUTION] * 8
    assert trainer.eval_dataset["a"] is table


def of_the_hub(monkeypatch, rows):
    monkeypatch.setattr(mt_grpo.recipe.data, "load_dataset", lambda *args, **kwargs: Dataset.from_list(rows))


class Plays:
    """Keeps what the check of the rows, and `reset`, get of a column of keyword arguments, and of another one."""

    keyword_columns = ("options",)
    checked: list = []
    began: list = []

    @classmethod
    def check_row(cls, row):
        cls.checked.append(row["options"])

    def reset(self, options, of, **row):
        Plays.began.append((of, json.dumps([options, row.get("truth")])))

    def get_reward(self) -> float:
        return 0.0


def test_nulls_of_files_and_of_tables_in_one_run(random_model, tmp_path, monkeypatch):
    """Arguments of a row of JSON are what it says; those of a table's row lose its padding, other columns keep it.

    Rows come through training, and through evaluations: of a file, of a table in Python and of one of the Hub.
    """
    options = [{"a": None, "b": {"c": None}}, {"d": 1}]
    rows = [{"prompt": [{"role": "user", "content": "?"}], "options": each, "truth": each} for each in options]
    table = Dataset.from_list([{**row, "of": "table"} for row in rows])
    of_the_hub(monkeypatch, [{**row, "of": "hub"} for row in rows])
    hub = load_rows("some/name", "train")
    train, held_out = (
        load_rows(written(tmp_path / f"{of}.jsonl", [{**row, "of": of} for row in rows]), "train")
        for of in ("train", "eval")
    )
    monkeypatch.setattr(Plays, "checked", [])
    monkeypatch.setattr(Plays, "began", [])
    args = settings(tmp_path / "out", max_completion_length=4, eval_strategy="steps", eval_steps=1)
    trainer = MTGRPOEnvTrainer(
        random_model, MultiTurnToolEnv([], None, environment=Plays, tool_format="xml"), [], [length_reward],
        args=MTGRPOConfig(**args), train_dataset=train, eval_dataset={"a": held_out, "b": table, "c": hub},
    )  # fmt: skip
    stripped, padded = (
        [{"b": {}}, {"d": 1}],
        [{"a": None, "b": {"c": None}, "d": None}, {"a": None, "b": None, "d": 1}],
    )
    assert Plays.checked == [*options, *options, *stripped, *stripped]
    trainer.train()
    expected = {of: zip(options, options) for of in ("train", "eval")}
    expected |= {of: zip(stripped, padded) for of in ("table", "hub")}
    assert {of: {got for its, got in Plays.began if its == of} for of in expected} == {
        of: {json.dumps(each) for each in pairs} for of, pairs in expected.items()
    }  # fmt: skip


# --- Images ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key, value", [("image", "cat.png"), ("images", ["cat.png"])])
@pytest.mark.parametrize("split", ["train_dataset", "eval_dataset"])
def test_images_are_refused_before_a_model_is_loaded(random_model, tmp_path, monkeypatch, key, value, split):
    """In a table the first row need not have one. The model reads text alone."""
    rows = [{"prompt": [{"role": "user", "content": "?"}], key: None}] * 8
    bad = Dataset.from_list([*rows[:7], {**rows[7], key: value}])
    good = Dataset.from_list(rows).remove_columns(key)
    data = {"train_dataset": good, "eval_dataset": {"held out": good}}
    data[split] = bad if split == "train_dataset" else {"held out": bad}
    monkeypatch.setattr("trl.trainer.grpo_trainer.create_model_from_path", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ValueError, match=f"{split}, row 7: the column '{key}' is .*cat.png"):
        MTGRPOEnvTrainer(
            random_model, MultiTurnToolEnv([], None), [], [length_reward], args=MTGRPOConfig(**settings(tmp_path)),
            **data,
        )  # fmt: skip


def test_a_picture_is_an_image(tmp_path):
    """As a table holds one, whatever its class."""
    picture = {"path": None, "bytes": (b"P6 1 1 255 " + bytes(3))}
    features = Features({"prompt": [{"role": Value("string"), "content": Value("string")}], "image": Image()})
    table = Dataset.from_dict({"prompt": [[{"role": "user", "content": "?"}]], "image": [picture]}, features=features)
    with pytest.raises(ValueError, match="train_dataset, row 0: the column 'image' is <PIL"):
        check_images(table, "train_dataset", MultiTurnToolEnv([], None))


@pytest.mark.parametrize("empty", [None, [], ""])
def test_columns_without_an_image_are_of_no_harm(random_model, tmp_path, empty):
    """ms-swift's and verl's texts have them. TRL would take None for an image."""
    key = "image" if empty is None else "images"
    data = load_rows(written(tmp_path / "rows.jsonl", [{"prompt": str(i), key: empty} for i in range(2)]), "train")
    got, seen, _ = roll_out(random_model, tmp_path / "out", data)
    assert seen["columns"] == {key: [empty] * 4} and json.loads(got[0])[key] == empty


# --- Many rows, and the same rows again ------------------------------------------------------------------------------


def test_the_checks_hold_a_row_at_a_time(random_model, tmp_path):
    """Those before a run, and the identity of the data."""
    rows = [{"prompt": f"What is {i}?", "text": "x" * 500} for i in range(4000)]
    data = load_rows(written(tmp_path / "rows.jsonl", rows), "train")
    env = make_trainer(random_model, tmp_path / "out").env
    for check in [
        lambda: dataset_sha256(data), lambda: longest_prompt(env, data), lambda: check_dataset(data, "train", env),
    ]:  # fmt: skip
        check()  # caches of libraries
        tracemalloc.start()
        try:
            check()
            assert tracemalloc.get_traced_memory()[1] < 300_000
        finally:
            tracemalloc.stop()


def test_data_has_an_identity():
    """Of its values alone: not of the kind of data, nor of the columns' order. A null is another row than nothing."""
    rows = [{"a": 1, "b": "x"}, {"a": 2, "b": None}]
    assert dataset_sha256(Rows(rows)) == dataset_sha256(Dataset.from_list(rows))
    assert dataset_sha256(Rows([{"b": "x", "a": 1}, {"b": None, "a": 2}])) == dataset_sha256(Rows(rows))
    others = [
        [{"a": 1, "b": "x"}, {"a": 2}], [{"a": 1.0, "b": "x"}, {"a": 2, "b": None}], rows[::-1], rows[:1],
        [{"a": 1, "b": "x"}, {"a": 2, "b": None}, {}], [{"a": 1, "c": "x"}, {"a": 2, "c": None}],
    ]  # fmt: skip
    hashes = {dataset_sha256(Rows(each)) for each in [rows, *others]}
    assert len(hashes) == 1 + len(others)

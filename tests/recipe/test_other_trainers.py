"""The first command of somebody who comes from ms-swift, verl or TRL: their keys get the name that they have here."""

import json
import re
from pathlib import Path

import pytest
import yaml

import mt_grpo_trainer as mt
from mt_grpo.recipe.keys import known_keys
from mt_grpo.recipe.other_trainers import OLDER_KEYS, SWIFT_KEYS, VERL_KEYS, look_up, paths_of
from mt_grpo.recipe.refusals import REFUSED_KEYS

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = json.loads((Path(__file__).parent / "other_trainers.json").read_text())
KNOWN = known_keys(mt.RECIPE_CLASSES)
# Arguments of TRL's trainers, names of versions before those of the list, and names of verl's documentation.
NOT_LISTED = {
    *("train_dataset", "eval_dataset", "model", "tools", "environment_factory", "rollout_func", "processing_class"),
    *("reward_processing_classes", "peft_config", "quantization_config", "request_timeout", "evaluation_strategy"),
    *("train_type", "sft_type", "model_id_or_path", "use_async_engine"),
}


@pytest.mark.parametrize("trainer", PUBLISHED)
def test_every_published_key_is_one_of_ours_or_gets_words(trainer):
    keys = PUBLISHED[trainer]["keys"]
    paths = keys if isinstance(keys, list) else [path for key, value in keys.items() for path in paths_of(key, value)]
    missing = [path for path in paths if path not in KNOWN and look_up(path) is None]
    assert missing == [] and len(paths) > 150


def test_every_key_of_the_table_is_published():
    for trainer, table in (("ms-swift", SWIFT_KEYS), ("TRL", OLDER_KEYS)):
        assert set(table) - set(PUBLISHED[trainer]["keys"]) - NOT_LISTED == set()
        assert set(table) & set(KNOWN) == set(), "a key of ours needs no other name"


def test_what_is_to_be_written_is_a_key_that_is_not_refused():
    for words in {*SWIFT_KEYS.values(), *OLDER_KEYS.values(), *VERL_KEYS.values()}:
        names = [words] if " " not in words else re.findall(r"`([a-z]\w*_\w+)(?::|`)", words)
        assert [name for name in names if name not in KNOWN or name in REFUSED_KEYS] == [], words
        assert len(words) < 160 and not words.endswith(".")


def test_the_page_has_every_other_name():
    page = (ROOT / "docs/moving.md").read_text()
    for table in (SWIFT_KEYS, OLDER_KEYS, VERL_KEYS):
        for theirs, ours in table.items():
            if " " not in ours and theirs.rpartition(".")[2] != ours:
                assert f"| `{theirs}` | `{ours}` |" in page


def error_of(recipe, *flags):
    with pytest.raises(ValueError) as error:
        mt.parse_arguments(["--config", str(recipe), *flags] if recipe else list(flags))
    return str(error.value)


def test_a_recipe_of_ms_swift_gets_all_names_at_once(tmp_path):
    recipe = tmp_path / "grpo.yaml"
    keys = {"rlhf_type": "grpo", "model": "Qwen/Qwen3-1.7B", "dataset": ["gsm8k"], "columns": {"q": "question"}}
    recipe.write_text(yaml.safe_dump({**keys, "num_generations": 8}, sort_keys=False))
    first, *lines = error_of(recipe).splitlines()
    assert first == f"There are 4 keys of another trainer in {recipe} (docs/moving.md):"
    assert lines == [
        "  rlhf_type (ms-swift): training is always by GRPO, and `credit_assignment` says which. Remove it.",
        "  model (ms-swift): write `model_name_or_path`.",
        "  dataset (ms-swift): write `dataset_name`.",
        "  columns (ms-swift): rename the columns in the data: `question` and `answer`, or `prompt`.",
    ]


def test_a_recipe_and_a_command_line_of_verl(tmp_path):
    recipe = tmp_path / "ppo.yaml"
    keys = {"data": {"train_files": "x", "return_raw_chat": True}, "actor_rollout_ref": {"rollout": {"n": 8}}}
    recipe.write_text(yaml.safe_dump({**keys, "critic": {"optim": {"lr": 1}}}))
    text = error_of(recipe)
    assert "  data.train_files (verl): write `dataset_name`." in text
    assert "  actor_rollout_ref.rollout.n (verl): write `num_generations`." in text
    assert "  critic.optim.lr (verl): there is no critic" in text
    text = error_of(None, "data.train_files=x.parquet", "+trainer.total_epochs=3", "--vllm_mode=colocate")
    assert "  data.train_files (verl)" in text and "  trainer.total_epochs (verl): write `num_train_epochs`" in text
    assert "There is a key of another trainer on the command line" in error_of(None, "--max_prompt_length", "512")


def test_a_slip_still_gets_the_nearest_name(tmp_path):
    assert error_of(None, "--learning_rat", "1").endswith("Did you mean 'learning_rate'?")

"""The zoom task: its pictures, its environment, its rewards, and that the bundled model learns by what it sees."""

from statistics import mean

import explain_credit
import pytest
from build import zoom as build
from PIL import Image
from project import ROOT, json_lines, trained
from scripted import Scripted, call
from transformers import AutoConfig, AutoTokenizer

import mt_grpo_trainer as mt
from mt_grpo.images.pictures import pictures_in, with_pictures
from mt_grpo.images.reader import image_reader
from mt_grpo.recipe.plugins import load_environment, load_rewards
from mt_grpo.rollout import ToolCall, ToolResult, Turn
from tools.zoom import CORNERS, Zoom, crop

RECIPE = "hf_recipes/tiny/zoom.yaml"
DATA = ROOT / "hf_recipes/tiny/zoom"
MODEL = ROOT / "hf_recipes/tiny/zoom-model"


@pytest.fixture
def tokenizer():
    """The bundled model's, which writes pictures."""
    found = AutoTokenizer.from_pretrained(MODEL)
    return with_pictures(found, image_reader(str(MODEL), AutoConfig.from_pretrained(MODEL), found))


def rows_of(split):
    return json_lines(DATA / f"{split}.jsonl")


def environment_of(image):
    found = Zoom()
    found.reset(image=image, question="Which digit is top left?", answer="7")
    return found


def test_the_bundled_data_are_those_of_the_program(tmp_path):
    """The same bytes twice, and the pixels of the bundled files, whose bytes depend on the version of zlib."""
    for name in ("one", "two"):
        build.write_data(tmp_path / name, {"train": 8, "test": 8})
    for split in ("train", "test"):
        one, two = ((tmp_path / name / f"{split}.jsonl").read_bytes() for name in ("one", "two"))
        assert one == two
        bundled = rows_of(split)
        assert len(bundled) == build.NUM_ROWS[split] and len({row["image"] for row in bundled}) == len(bundled)
        for made, row in zip(build.make_rows(split, 8), bundled, strict=False):
            shared = {k: row[k] for k in row if k != "image"}
            assert {key: made[key] for key in ("question", "answer", "corner")} == shared
            assert Zoom().reset(row["image"]) is None
            assert environment_of(row["image"]).image.tobytes() == made["image"].convert("RGB").tobytes()
            assert row["answer"] == str(made["digits"][CORNERS.index(row["corner"])])
    assert not {row["image"] for row in rows_of("train")} & {row["image"] for row in rows_of("test")}


@pytest.mark.parametrize("corner, first", [
    ("top left", 0), ("top right", 27), ("bottom left", 28 * 27), ("bottom right", 28 * 28 - 1),
])  # fmt: skip
def test_a_crop_is_the_pixels_enlarged(corner, first, monkeypatch):
    """Of 28 x 28 pixels, each with its number: a corner is one of them."""
    image = Image.new("RGB", (28, 28))
    image.putdata([(number % 256, number // 256, 7) for number in range(28 * 28)])
    colour = (first % 256, first // 256, 7)
    assert set(environment_of(image).zoom(corner).get_flattened_data()) == {colour}
    assert environment_of(image).zoom(corner).size == (56, 56)
    monkeypatch.setenv("ZOOM_SIDE", "112")
    assert environment_of(image).zoom(corner).size == (112, 112)
    large = image.resize((56, 56), Image.Resampling.NEAREST)
    large.putpixel((55, 55), (1, 2, 3))
    enlarged = crop(large, "bottom right", 4)
    last = (28 * 28 - 1) % 256, (28 * 28 - 1) // 256, 7
    assert [enlarged.getpixel((x, y)) for y in (1, 2) for x in (1, 2)] == [last, last, last, (1, 2, 3)]


def test_shuffled_crops_are_of_another_corner(monkeypatch):
    row = rows_of("train")[0]
    environment = environment_of(row["image"])
    right = {corner: environment.zoom(corner).tobytes() for corner in CORNERS}
    monkeypatch.setenv("ZOOM_SHUFFLED", "1")
    shuffled = {corner: environment.zoom(corner).tobytes() for corner in CORNERS}
    assert all(shuffled[corner] != right[corner] and shuffled[corner] in right.values() for corner in CORNERS)
    assert {corner: environment_of(row["image"]).zoom(corner).tobytes() for corner in CORNERS} == shuffled


def test_a_bad_argument_is_read_by_the_model(tokenizer):
    """And a good call gives a picture as the model's processor reads it: four tokens."""
    _, cls = load_environment(None, "tools/zoom.py", mt.MultiTurnToolEnv)
    env = mt.MultiTurnToolEnv([], None, tokenizer=tokenizer, environment=cls)
    row = rows_of("test")[0]
    calls = [call("zoom", corner="middle"), call("zoom", place="top left"), call("zoom", corner="top left")]
    script = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (*calls, "<answer>7</answer>")]
    env.max_steps = 3
    question = [{"role": "user", "content": row["question"]}]
    (rollout,) = env.generate([question], Scripted([script]), rows=[row])["rollouts"]
    wrong, unknown, right = [turn.results[0] for turn in rollout.turns[:3]]
    assert wrong.error == unknown.error == "call" and right.error is None
    assert "middle" in wrong.text and "top left" in wrong.text and "corner" in unknown.text
    assert right.pictures[0].image.tobytes() == environment_of(row["image"]).zoom("top left").tobytes()
    whole, shown = pictures_in(rollout.prompt_ids + rollout.completion_ids)
    assert (whole.num_tokens, shown.num_tokens) == (4, 4) and whole.image.size == (56, 56)  # as it is seen
    (reward,) = load_rewards("rewards/zoom_reward.py")[0]
    (outcome, given) = load_rewards("rewards/zoom_reward.py")[1]
    assert reward([rollout.turns], corner=["top left"]) == [[0.0, 0.0, 0.5, None]]
    assert reward([rollout.turns], corner=["top right"]) == [[0.0, 0.0, 0.0, None]]
    again = [*rollout.turns[:3], rollout.turns[2]]
    assert reward([again], corner=["top left"]) == [[0.0, 0.0, 0.5, 0.0]]  # once
    calls = [ToolCall("zoom", {"corner": each}) for each in CORNERS]
    everywhere = Turn([], None, "", "stop", calls, [ToolResult("")] * 4)
    assert reward([[everywhere]], corner=["top left"]) == [[0.0]]  # which is no choice
    assert outcome([rollout.turns], answer=["7"]) == [1.0] and outcome([rollout.turns], answer=["8"]) == [0.0]
    assert given([rollout.turns]) == [0.1] and given([rollout.turns[:3]]) == given([[]]) == [0.0]


def test_the_explanation_of_its_credit_names_pictures():
    shown = explain_credit.explain(RECIPE, 0, [])
    read = [result["text"] for row in shown.rows for turn in row["turns"] for result in turn["results"]]
    assert sum(text.startswith("<image ") for text in read) > 4 and "\ufdd0" not in "".join(read)


def exact_match(folder):
    """Per step."""
    names = ("rewards/exact_match_reward_func/mean", "rewards/right_corner_reward_func/mean")
    steps = trained(RECIPE, folder)
    return [[row[name] for row in steps] for name in names]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_model_learns_to_look_and_to_read(tmp_path, monkeypatch):
    """With crops of other corners it learns which one to ask for, which is paid, and never the digit."""
    exact, corner = exact_match(tmp_path / "out")
    assert mean(exact[:5]) < 0.4 and mean(exact[-10:]) > 0.65 and mean(corner[-10:]) > 0.45
    monkeypatch.setenv("ZOOM_SHUFFLED", "1")
    exact, corner = exact_match(tmp_path / "control")
    assert max(mean(exact[i : i + 10]) for i in range(20, len(exact), 10)) < 0.2 and mean(corner[-10:]) > 0.4

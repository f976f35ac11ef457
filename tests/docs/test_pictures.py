"""The pictures of the docs: what their legends promise stands in them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from bench import common
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"credit_page.png", "viewer.png"}  # a browser's: their colours are the viewer's
DRAWN = sorted(path.name for path in (ROOT / "docs").glob("*.png") if path.name not in PAGES)
NEAR = 40  # of a colour's 255 steps, per channel: the edge of a thin line is mixed with what is beneath
PIXELS = 12  # a line of 2 pixels' width has more


def missing_colours(path: Path) -> list[str]:
    """The labels whose colour is missing in their plot, or in their legend, and those that share one in a legend."""
    image = Image.open(path)
    legends = json.loads(image.info["Legends"])
    pixels = np.asarray(image.convert("RGB")).astype(int)
    missing = []
    for drawn in legends:
        left, top, right, bottom = drawn["legend"]
        key = pixels[top:bottom, left:right].copy()
        outside = pixels.copy()
        outside[top:bottom, left:right] = 255
        left, top, right, bottom = drawn["plot"]
        for label, colour in drawn["colours"].items():
            rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
            for part in (outside[top:bottom, left:right], key):
                if (abs(part - rgb).max(-1) < NEAR).sum() < PIXELS:
                    missing.append(label)
        if len(set(drawn["colours"].values())) < len(drawn["colours"]):
            missing.append(f"two of {sorted(drawn['colours'])} have one colour")
    return missing


@pytest.mark.parametrize("name", DRAWN)
def test_what_a_legend_promises_stands_in_the_picture(name):
    assert json.loads(Image.open(ROOT / "docs" / name).info["Legends"]), "drawn by save_picture, with a legend"
    assert missing_colours(ROOT / "docs" / name) == []


def draw(path: Path, colours: tuple[str, str]) -> None:
    figure, axis = common.pyplot().subplots(figsize=(3, 2))
    for label, colour, height in zip("ab", colours, (1, 2), strict=True):
        axis.plot([0, 1], [height, height], color=colour, label=label)
    axis.legend(loc="center")
    common.save_picture(figure, path)


def test_a_picture_whose_colours_were_changed_is_noticed(tmp_path):
    """By hand: a palette of 8 greys has neither blue nor orange; two lines of one colour cannot be told."""
    draw(tmp_path / "good.png", ("#0072B2", "#E69F00"))
    assert missing_colours(tmp_path / "good.png") == []
    image = Image.open(tmp_path / "good.png")
    grey = Image.merge("RGB", [image.convert("L").quantize(8).convert("L")] * 3)
    info = Image.open(tmp_path / "good.png").info["Legends"]
    from PIL.PngImagePlugin import PngInfo

    chunk = PngInfo()
    chunk.add_text("Legends", info)
    grey.save(tmp_path / "grey.png", pnginfo=chunk)
    assert missing_colours(tmp_path / "grey.png") == ["a", "a", "b", "b"]
    draw(tmp_path / "same.png", ("#0072B2", "#0072B2"))
    assert missing_colours(tmp_path / "same.png") == ["two of ['a', 'b'] have one colour"]

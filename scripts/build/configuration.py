"""Write the tables of docs/configuration.md from the fields of the settings: `python scripts/build/configuration.py`.

A table stands after the comment that names its keys. tests/docs/test_docs.py fails if the page is not up to date.
"""

import json
import re
from pathlib import Path

import mt_grpo_trainer as mt
from mt_grpo.recipe.parse import default_of, fact_of, field_of

PAGE = Path(__file__).resolve().parents[2] / "docs/configuration.md"
TABLE = re.compile(r"(?<=<!-- keys: )([\w ]+) -->\n.*?(?=<!-- end of keys -->)", re.S)


def row(key: str) -> str:
    """A key's line: name, default, values, meaning. TRL's texts are cut after their first sentence."""
    classes = mt.recipe_classes()
    field = field_of(key, classes)
    default, text = default_of(key, classes), " ".join(field.metadata["help"].replace("%%", "%").split())
    if "within" not in field.metadata:  # TRL's
        text = re.split(r"\. (?=[^a-z])", text)[0].rstrip(".")
    values = fact_of(field, "one_of") or fact_of(field, "within")
    allowed = values if isinstance(values, str) else ", ".join(f"`{value}`" for value in values or ())
    number = f"{default:g}" if isinstance(default, float) else default
    shown = number if isinstance(number, str) else json.dumps(number)
    return f"| `{key}` | {'' if default is None else f'`{shown}`'} | {allowed} | {text} |\n"


def with_tables(page: str) -> str:
    """The page with its tables made anew."""
    head = "| key | default | values | meaning |\n|---|---|---|---|\n"
    return TABLE.sub(lambda found: f"{found[1]} -->\n{head}{''.join(map(row, found[1].split()))}", page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""YAML as a person means it: no key twice, and no number that YAML 1.1 alone reads as one."""

from __future__ import annotations

import collections.abc
import re
from typing import Any

import yaml


class RecipeLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` that raises `YAMLError` for a key that is set twice; the original uses the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, collections.abc.Hashable):
                continue
            if key in lines:
                raise yaml.YAMLError(
                    f"{key!r} is set on line {lines[key]} and again on line {line}. Remove one of them."
                )
            lines[key] = line
        return super().construct_mapping(node, deep)


def plain_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    """A number; `1:30` and `010` stay text, which no number's key takes. YAML 1.1 would read 90 and 8."""
    if ":" in node.value or re.fullmatch(r"[-+]?0[0-9_]+", node.value):
        return node.value
    return {"int": loader.construct_yaml_int, "float": loader.construct_yaml_float}[node.tag.rpartition(":")[2]](node)


for tag in ("int", "float"):
    RecipeLoader.add_constructor(f"tag:yaml.org,2002:{tag}", plain_number)

"""Write docs/configuration.md, the reference of the settings of recipes, from their classes: python tools/settings_page.py."""

from __future__ import annotations

import types
from pathlib import Path, PurePath
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from areal.recipes.config import (
    DPOConfig,
    FixedDataConfig,
    PreferenceConfig,
    RewardModelConfig,
    RunConfig,
    SFTConfig,
)
from areal.recipes.policy_config import DistillConfig, GRPOConfig, PolicyConfig, PPOConfig

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

CLASSES: dict[str, type[RunConfig]] = {
    "All recipes": RunConfig,
    "Fixed data: sft, dpo, rm": FixedDataConfig,
    "Supervised fine-tuning: sft": SFTConfig,
    "Pairs: dpo, rm": PreferenceConfig,
    "Direct preference optimisation: dpo": DPOConfig,
    "Reward models: rm": RewardModelConfig,
    "Reinforcement learning: grpo, ppo, distill": PolicyConfig,
    "Group-relative policy optimisation: grpo": GRPOConfig,
    "PPO with a critic: ppo": PPOConfig,
    "Distillation on policy: distill": DistillConfig,
}
"""Class of each section. A section has the settings that its class adds, or whose default it changes."""

TOPICS = {
    "model": "Model and data",
    "backend": "Engine",
    "steps": "Optimisation",
    "eval_every": "Evaluation, files and trackers",
    "reward": "Reward and tools",
    "groups": "Batches",
    "max_new_tokens": "Answers and evaluation",
    "servers": "Servers",
}
"""First setting of each topic of a long section."""

_TOPIC_SIZE = 10
"""Sections with more settings are divided into topics."""

_HEADER = """# Settings of recipes

Settings of `areal sft|dpo|rm|grpo|ppo|distill` and of the functions of `areal.recipes`. In a TOML
file and as `key=value` on the command line they have the same names; a later file or `key=value`
replaces an earlier one, and keys of a table are written with a dot:

```text
areal grpo run.toml lr=1e-6 engine.activation_checkpointing=full 'trackers=["console", "wandb"]'
```

A name that does not exist, a value of another type and settings that contradict each other are
errors. `areal grpo --help` prints the same list. [Recipes](recipes.md) explains the use,
[options](options.md) the fields of `engine`, and [layouts](layouts.md) the values of `backend`.

`python tools/settings_page.py` writes this page from the classes in `areal.recipes.config` and
`areal.recipes.policy_config`. Settings whose default is "none" may be left out.
"""


def page() -> str:
    """Return the text of the page."""
    parts = [_HEADER]
    for title, config_class in CLASSES.items():
        fields = own_fields(config_class)
        parts.append(f"## {title}\n")
        if len(fields) <= _TOPIC_SIZE:
            parts.append(table(fields))
        else:
            for topic, its in topics(fields).items():
                parts += [f"### {topic}\n", table(its)]
    return "\n".join(parts)


def own_fields(config_class: type[RunConfig]) -> dict[str, FieldInfo]:
    """Return the settings that a class declares itself."""
    return {name: field for name, field in config_class.model_fields.items() if name in config_class.__annotations__}


def topics(fields: dict[str, FieldInfo]) -> dict[str, dict[str, FieldInfo]]:
    """Divide settings into topics.

    Raises:
        ValueError: the first one begins no topic.
    """
    divided: dict[str, dict[str, FieldInfo]] = {}
    topic = None
    for name, field in fields.items():
        topic = TOPICS.get(name, topic)
        if topic is None:
            raise ValueError(f"{name!r} begins no topic: name it in TOPICS")
        divided.setdefault(topic, {})[name] = field
    return divided


def table(fields: dict[str, FieldInfo]) -> str:
    """Return a table in Markdown."""
    rows = [
        f"| `{name}` | {values(field.annotation)} | {default(field)} | {field.description} |"
        for name, field in fields.items()
    ]
    return "\n".join(["| setting | values | default | meaning |", "|---|---|---|---|", *rows, ""])


def default(field: FieldInfo) -> str:
    """Return the default of a setting, as a TOML file has it."""
    if field.is_required():
        return "required"
    value = field.get_default()
    return "none" if value is None else f"`{_toml(value)}`"


def values(annotation: Any) -> str:
    """Return the values that a setting may have: the name of a type, or a list of strings."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return values(next(each for each in arguments if each is not type(None)))
    if origin is tuple:
        inner = values(arguments[0])
        return f"list of {inner}" if "`" in inner else f"list of {inner}s"
    if origin is dict:
        return "table"
    return {bool: "true, false", int: "integer", float: "number", str: "string", Path: "path"}[annotation]


def _toml(value: Any) -> str:
    """Return a value in TOML's form, with the strings that need no quotes on the command line without them."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(f'"{each}"' for each in value) + "]"
    if isinstance(value, str | PurePath):
        return str(value) or '""'
    return repr(value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""What a run would do, for `--dry-run`: its settings, layout, memory, and the first row as the model sees it."""

from __future__ import annotations

import json
from typing import Any

from areal.plan.state_bytes import describe_state
from areal.recipes.record.secrets import public_settings
from areal.recipes.run import Run


def description(run: Run[Any]) -> str:
    """Return a text of several lines. No engine is made."""
    config = run.config
    return "\n".join(
        (
            json.dumps(public_settings(config, changed_only=True), indent=2),
            f"{config.backend}: {config.engine_config().dims.world_size} ranks, {config.compute_dtype}",
            describe_state(config.engine_config()),
            "first row, with trained tokens in [[ ]]:",
            rendered(run),
        )
    )


def rendered(run: Run[Any]) -> str:
    """Return the text of the first row, with trained parts in double brackets."""
    parts = []
    for segment in run.first_sample():
        text = str(run.tokenizer.decode(list(segment.tokens)))
        parts.append(f"[[{text}]]" if segment.trainable else text)
    return "".join(parts)

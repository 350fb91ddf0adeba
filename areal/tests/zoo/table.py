"""The table of the zoo: findings in a file next to this one, and the page that shows them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import transformers

from areal.tests.zoo.examine import Finding

FILE = Path(__file__).with_name("table.json")
PAGE = Path(__file__).parents[3] / "docs" / "model-zoo.md"

_HEADER = """# Model zoo

`make test-zoo` writes this page. It goes over every model type that transformers {version} builds as a
causal language model. Each becomes a tiny model with random weights, without dropout, in float32,
which one rank of the FSDP engine (`fsdp:d1`) and plain transformers run. Transformers runs one
sequence at a time. The log-probs of every token and the gradients of every weight must agree.
Families that take images, videos or sound, too, are trained with `fsdp.text_only=True`.

| result | families |
|---|---|
| [packed](#packed): sequences end to end | {packed} |
| [rows](#rows): one padded sequence per row | {rows} |
| [refused](#refused): an error when the engine is built | {refused} |
| [not examined](#not-examined): transformers builds no tiny model | {missing} |

No family runs with wrong numbers or fails after it was built. [Model
families](model-families.md#how-an-unknown-family-is-probed) describes how the engine decides.
"""


def read() -> tuple[str, dict[str, Finding]]:
    """Return the version of transformers and the findings of the committed table."""
    content = json.loads(FILE.read_text())
    return content["transformers"], {name: Finding(**finding) for name, finding in content["families"].items()}


def write(findings: Mapping[str, Finding]) -> None:
    """Write the table and its page."""
    families = {name: asdict(findings[name]) for name in sorted(findings)}
    content = {"transformers": transformers.__version__, "families": families}
    FILE.write_text(json.dumps(content, indent=1) + "\n")
    PAGE.write_text(render(transformers.__version__, findings))


def render(version: str, findings: Mapping[str, Finding]) -> str:
    """Return the page, in the style of the documentation."""
    by_verdict: dict[str, list[str]] = {}
    for name in sorted(findings):
        by_verdict.setdefault(findings[name].verdict, []).append(name)
    packed, rows, refused, missing = (by_verdict.get(x, []) for x in ("packed", "rows", "refused", "no model"))
    text = _HEADER.format(
        version=version, packed=len(packed), rows=len(rows), refused=len(refused), missing=len(missing)
    )
    text += f"\n## Packed\n\n{_names(packed)}\n"
    text += "\n## Rows\n\nThe text after the colon is the reason why the engine does not pack.\n\n"
    text += _by_reason(rows, findings)
    text += "\n## Refused\n\n" + _by_reason(refused, findings)
    return text + "\n## Not examined\n\n" + _by_reason(missing, findings)


def _by_reason(names: list[str], findings: Mapping[str, Finding]) -> str:
    """Return a list with one entry for each reason."""
    reasons: dict[str, list[str]] = {}
    for name in names:
        # Some reasons repeat the name of the family.
        why = findings[name].why.replace(f"model_type = {name!r} ", "").replace(f"model type {name!r}: ", "")
        reasons.setdefault(why, []).append(name)
    entries = (
        textwrap.fill(f"- {', '.join(f'`{name}`' for name in group)}: {_escaped(why)}", 100, subsequent_indent="  ")
        for why, group in sorted(reasons.items(), key=lambda item: item[1])
    )
    return "\n".join(entries) + "\n"


def _names(names: list[str]) -> str:
    return textwrap.fill(", ".join(f"`{name}`" for name in names), 100, break_on_hyphens=False)


def _escaped(text: str) -> str:
    # Braces, brackets and angle brackets are code in an error; the page must not read them as links or tags.
    return text.replace("<", "&lt;").replace("[", "\\[").replace("*", "\\*").replace("_", "\\_")

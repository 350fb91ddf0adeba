"""Samples of a run: some groups of each batch, as lines of JSON and as a page for a browser."""

from __future__ import annotations

import html
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from areal.recipes.record.replaced_file import replaced
from areal.trainer.estimators import Sample

SAMPLES, PAGE = "samples.jsonl", "samples.html"
"""Files in the directory of a run."""

_SHOWN_STEPS = 25
_COST = 0.005
"""Largest part of the time that goes into the page."""


class SampleLog:
    """Writes the first groups of each batch. Used by one rank, with the samples that it trains on.

    A line has ``step``, ``group``, ``prompt`` and ``answer`` (text), ``reward``, ``advantage`` (mean over the answer), ``truncated``,
    ``versions`` (first and last), and of each token ``ids``, ``trained``, and ``error``: log-prob of the trainer before the update minus that
    of the rollout, in nats. The page shows the last 25 steps. It is written again as often as half a percent of the time allows.

    Args:
        folder: directory of the run.
        groups: number of groups of each batch.
        decode: function from token ids to text.
        append: go on with the lines of a run that is resumed.
    """

    def __init__(
        self, folder: Path, groups: int, decode: Callable[[Sequence[int]], str], *, append: bool = False
    ) -> None:
        self._page, self._groups, self._decode = folder / PAGE, groups, decode
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / SAMPLES).open("a" if append else "w", encoding="utf-8")
        self._shown: deque[list[dict[str, Any]]] = deque(maxlen=_SHOWN_STEPS)
        self._next_page = 0.0

    def __call__(self, step: int, samples: Sequence[Sample]) -> None:
        """Write the samples of a batch's first groups.

        Args:
            step: number of the step, from 1.
            samples: as :class:`~areal.trainer.ppo.PPOTrainer` passes them to ``inspect``.
        """
        chosen = list(dict.fromkeys(int(sample["group_ids"]) for sample in samples))[: self._groups]
        lines = [self._line(step, sample) for sample in samples if int(sample["group_ids"]) in chosen]
        self._file.writelines(json.dumps(line) + "\n" for line in lines)
        self._file.flush()
        self._shown.append(lines)
        if time.monotonic() >= self._next_page:
            self._write_page()

    def close(self) -> None:
        """Write the page of the last steps."""
        self._file.close()
        if self._shown:
            self._write_page()

    def _line(self, step: int, sample: Sample) -> dict[str, Any]:
        ids = sample["input_ids"].tolist()
        # A value of a token is at the position before it.
        trained = [False, *(bool(each) for each in sample["loss_mask"].tolist()[:-1])]
        begin = trained.index(True) if True in trained else len(ids)
        error = (sample["old_logprobs"].cpu() - sample["rollout_logprobs"].cpu()).double()
        mask = sample["loss_mask"] != 0
        # Episodes of a user may leave them out.
        versions = [int(version) for version in sample["versions"][mask].tolist()] if "versions" in sample else []
        return {
            "step": step,
            "group": int(sample["group_ids"]),
            "prompt": self._decode(ids[:begin]),
            "answer": self._decode(ids[begin:]),
            "reward": float(sample["rewards"]),
            "advantage": float(sample["advantages"][mask].double().mean()) if mask.any() else 0.0,
            "truncated": bool(sample["truncated"]),
            "versions": [min(versions), max(versions)] if versions else [],
            "ids": ids,
            "trained": [int(each) for each in trained],
            "error": [0.0, *(round(float(each), 5) for each in error[:-1])],
        }

    def _write_page(self) -> None:
        begin = time.monotonic()
        groups = [self._group(lines) for lines in reversed(self._shown)]
        with replaced(self._page) as draft:
            draft.write_text(_PAGE.replace("$samples", "\n".join(groups)), encoding="utf-8")
        seconds = time.monotonic() - begin
        self._next_page = time.monotonic() + seconds / _COST

    def _group(self, lines: Sequence[dict[str, Any]]) -> str:
        """Return the rows of one step."""
        return "".join(
            f"<tr><td>{line['step']}</td><td>{line['group']}</td><td>{line['reward']:.3g}</td><td>{line['advantage']:.3g}</td>"
            f"<td>{'–'.join(map(str, dict.fromkeys(line['versions'])))}</td><td class=text>{self._tokens(line)}</td></tr>\n"
            for line in lines
        )

    def _tokens(self, line: dict[str, Any]) -> str:
        """Return the tokens as HTML, coloured by the difference of log-probs where they are trained on."""
        parts = []
        for token, trained, error in zip(line["ids"], line["trained"], line["error"], strict=True):
            text = html.escape(self._decode([token])).replace("\n", "↵\n")
            if not trained:
                parts.append(text)
                continue
            red = min(1.0, abs(error))
            parts.append(f'<b style="background:rgba(220,60,40,{red:.2f})" title="{error:+.5f} nats">{text}</b>')
        return "".join(parts)


_PAGE = """<!doctype html>
<meta charset="utf-8"><title>Samples</title>
<style>
body { font: 14px sans-serif; margin: 1em } table { border-collapse: collapse; width: 100% }
td, th { border: 1px solid #ccc; padding: 4px; vertical-align: top; text-align: left }
.text { white-space: pre-wrap; font-family: monospace; color: #777 } .text b { color: #000; font-weight: normal; border-bottom: 1px solid #7a7 }
</style>
<h1>Samples of the last steps</h1>
<p>Grey: given to the model. Black, underlined: sampled and trained on. The redder, the more the trainer's log-prob before the update differs
from that of the rollout (full red: 1 nat); the number is shown under the pointer.</p>
<table><tr><th>step</th><th>group</th><th>reward</th><th>advantage</th><th>version</th><th>tokens</th></tr>
$samples</table>
"""

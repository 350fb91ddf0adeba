"""Positions: which models have learned theirs, and frequencies that depend on the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, GPT2Config, OPTConfig

from areal.engine.batch_rules import ContextCheck
from areal.engine.model.heads import learns_positions
from areal.engine.model.hub import check_rope, copy_model_files
from areal.tests.grid.models import FAMILIES

POSITIONS = 16
TABLES: dict[str, Any] = {
    "gpt2": GPT2Config(vocab_size=64, n_positions=POSITIONS, n_embd=32, n_layer=1, n_head=4),
    "opt": OPTConfig(
        vocab_size=64,
        max_position_embeddings=POSITIONS,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=32,
        num_hidden_layers=1,
        num_attention_heads=4,
    ),
}


@pytest.mark.parametrize("family", TABLES)
def test_tables_of_positions_are_found(family: str) -> None:
    assert learns_positions(AutoModelForCausalLM.from_config(TABLES[family]))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text"])
def test_rotary_positions_have_no_table(family: str) -> None:
    config = FAMILIES[family]()
    config.vocab_size = config.max_position_embeddings  # the table of tokens has as many rows
    assert not learns_positions(AutoModelForCausalLM.from_config(config))


def test_a_sequence_beyond_learned_positions_is_refused() -> None:
    check = ContextCheck()
    check.check(POSITIONS, POSITIONS, True, True)
    with pytest.raises(
        ValueError, match=f"a sequence has {POSITIONS + 1} tokens, and the model has learned {POSITIONS} positions"
    ):
        check.check(POSITIONS + 1, POSITIONS, True, True)
    check.check(POSITIONS + 1, POSITIONS, False, True)
    check.check(POSITIONS + 1, None, True, True)


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_frequencies_of_one_kind_of_layers_that_depend_on_the_batch_are_refused(rope: str, kind: str) -> None:
    config = FAMILIES["gemma3_text"]()
    check_rope(config)
    config.rope_parameters[kind] |= {"rope_type": rope}
    with pytest.raises(ValueError, match=f"rope_type = '{rope}': its frequencies depend on the longest sequence"):
        check_rope(config)


def test_files_of_videos_and_of_mistral_tokenizers_are_copied(tmp_path: Path) -> None:
    source, draft = tmp_path / "source", tmp_path / "draft"
    names = ["preprocessor_config.json", "tekken.json", "video_preprocessor_config.json"]
    for folder in (source, draft):
        folder.mkdir()
    for name in names:
        (source / name).write_text("{}")
    assert sorted(copy_model_files(str(source), draft)) == names

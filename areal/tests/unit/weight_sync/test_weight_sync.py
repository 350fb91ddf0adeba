"""Weight synchronization: streams of tensors, and loading into modules by name."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal.api import NamedTensor, WeightUpdateMeta
from areal.tests.grid.models import FAMILIES, model_dir
from areal.tests.harness.tiny import gpt2_dir, same_bits
from areal.weight_sync import ModuleSource, load_named
from areal.weight_sync.apply import Replica, Staging
from areal.weight_sync.transport import OutgoingTensors


def tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 200, shape, generator=generator).to(dtype)


def model(family: str = "qwen3", *, seed: int | None = None, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a tiny model. With a ``seed``, every weight differs from the files."""
    made = AutoModelForCausalLM.from_pretrained(model_dir(family), dtype=dtype)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for stored in made.state_dict().values():
                stored.copy_(torch.randn(stored.shape, generator=generator))
    return made


def stored(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def named(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in ModuleSource(module).named_tensors()}


def test_stream_casts_only_floats_selects_and_counts() -> None:
    tensors = {"a": tensor((4,), torch.float32), "b": tensor((4,), torch.int64), "c": tensor((4,), torch.float32)}
    stream = (NamedTensor(*item) for item in tensors.items())
    outgoing = OutgoingTensors(stream, 3, lambda name: name != "c", torch.bfloat16)
    assert {name: value.dtype for name, value in outgoing} == {"a": torch.bfloat16, "b": torch.int64}
    assert outgoing.meta == WeightUpdateMeta(3, "selected", 2, 4 * 2 + 4 * 8)
    with pytest.raises(ValueError, match="no tensor was selected"):
        list(OutgoingTensors((NamedTensor(*item) for item in tensors.items()), 3, lambda name: False, None))


@pytest.mark.parametrize(("fields", "message"), [((-1, "full"), "version = -1"), ((0, "half"), "kind = 'half'")])
def test_invalid_weight_sync_meta_raises(fields: tuple[int, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightUpdateMeta(*fields, 0, 0)  # type: ignore[arg-type]


# ---- loading into a module


@pytest.mark.parametrize("family", [*FAMILIES])
def test_every_family_loads_its_weights_by_file_names(family: str) -> None:
    """Load by file names, independently of the layout in memory; tied weights stay tied."""
    source, target = model(family, seed=1), model(family, seed=2)
    tied = target.get_input_embeddings().weight is target.get_output_embeddings().weight
    assert not same_bits(stored(source), stored(target))
    n = load_named(target, ModuleSource(source).named_tensors())
    assert n == len([*ModuleSource(source).named_tensors()])
    assert same_bits(stored(source), stored(target))
    assert (target.get_input_embeddings().weight is target.get_output_embeddings().weight) == tied


def test_other_transformers_families_load_weights() -> None:
    source = AutoModelForCausalLM.from_pretrained(gpt2_dir())
    target = AutoModelForCausalLM.from_pretrained(gpt2_dir(n_layer=2))
    torch.nn.init.normal_(target.transformer.wte.weight)
    load_named(target, ModuleSource(source).named_tensors())
    assert same_bits(stored(source), stored(target))


def test_loaded_values_are_cast_to_module_dtype() -> None:
    source, target = model(seed=1), model(seed=2, dtype=torch.bfloat16)
    load_named(target, ModuleSource(source).named_tensors())
    assert same_bits(stored(target), {name: value.bfloat16() for name, value in stored(source).items()})


def test_tied_weight_loads_under_either_name() -> None:
    source, target = model("qwen3_tied", seed=1), model("qwen3_tied", seed=2)
    tensors = named(source)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    load_named(target, (NamedTensor(*item) for item in tensors.items()))
    assert same_bits(stored(source), stored(target))


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors["model.norm.weight"]


def add(tensors: dict[str, Tensor]) -> None:
    tensors["model.more.weight"] = torch.ones(3)


def reshape(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(7)


def untie(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


MISFITS = {
    "missing": ("qwen3", drop, r"did not send 'model\.norm\.weight', which the replica has"),
    "unknown": ("qwen3", add, r"sends 'model\.more\.weight', which the replica \(Qwen3ForCausalLM\) has not"),
    "shape": ("qwen3", reshape, r"model\.norm\.weight: the trainer sends \[7\], and the replica has \[32\]"),
    "untied": ("qwen3_tied", untie, r"'model\.embed_tokens\.weight' and 'lm_head\.weight'.*tie_word_embeddings"),
}


def load_into(target: PreTrainedModel, tensors: list[NamedTensor]) -> None:
    load_named(target, tensors)


def stage_for(target: PreTrainedModel, tensors: list[NamedTensor]) -> None:
    stage(Replica(target), tensors).check()


def compare_with(target: PreTrainedModel, tensors: list[NamedTensor]) -> None:
    Replica(target).check({name: tuple(value.shape) for name, value in tensors}, complete=True)


@pytest.mark.parametrize("misfit", [*MISFITS])
@pytest.mark.parametrize("way", [load_into, stage_for, compare_with])
def test_mismatched_weights_raise_and_name_the_tensor(
    misfit: str, way: Callable[[PreTrainedModel, list[NamedTensor]], None]
) -> None:
    family, damage, message = MISFITS[misfit]
    target = model(family, seed=2)
    before, tensors = stored(target), named(model(family, seed=1))
    damage(tensors)
    with pytest.raises(ValueError, match=message):
        way(target, [NamedTensor(*item) for item in tensors.items()])
    assert way is load_into or same_bits(stored(target), before)


def stage(replica: Replica, tensors: list[NamedTensor], *, complete: bool = True) -> Staging:
    staging = Staging(replica, complete=complete, device=torch.device("cpu"))
    for item in tensors:
        staging.put(item)
    return staging


def test_partial_update_keeps_other_weights() -> None:
    source, target = model(seed=1), model(seed=2)
    before = stored(target)
    n = load_named(target, (t for t in ModuleSource(source).named_tensors() if "q_proj" in t.name), complete=False)
    assert n == 2
    changed = {name for name, value in stored(target).items() if not torch.equal(value, before[name])}
    assert changed == {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)}


def test_duplicate_tensor_raises() -> None:
    target = model(seed=2)
    norm = NamedTensor("model.norm.weight", torch.ones(32))
    with pytest.raises(ValueError, match=r"model\.norm\.weight: it was sent twice"):
        load_named(target, [norm, norm], complete=False)
    with pytest.raises(ValueError, match=r"model\.norm\.weight: it was sent twice"):
        stage(Replica(target), [norm, norm], complete=False)


def test_staging_does_not_change_weights_before_commit() -> None:
    source, target = model("qwen3_moe", seed=1), model("qwen3_moe", seed=2)
    replica, before = Replica(target), stored(target)
    staging = stage(replica, [*ModuleSource(source).named_tensors()])
    staging.check()
    assert same_bits(stored(target), before)
    assert replica.version is None
    staging.commit(4)
    assert same_bits(stored(target), stored(source))
    assert replica.version == 4

"""Layouts and configurations: parsing, printing and validation, without a process group."""

from __future__ import annotations

import math
import pickle
import re
from types import NoneType
from typing import Any, ClassVar, get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from areal.api import (
    BackendConfig,
    FinetuneSpec,
    FSDPConfig,
    LoRAConfig,
    MegatronConfig,
    Metric,
    MicroBatchSpec,
    OptimizerConfig,
    ParallelDims,
    SaveLoadMeta,
    TopK,
    TrainEngineConfig,
)
from areal.engine.fsdp.engine import FSDPEngine
from areal.engine.options import TEMPLATE_OPTIONS, engine_config

DEGREE = st.integers(1, 6)


@settings(deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys("drtcpe", DEGREE)), st.integers(1, 3), st.permutations("drptce"))
def test_layout_string_round_trips(n: dict[str, int], v: int, order: list[str]) -> None:
    text = "".join(f"{letter}{n[letter]}" for letter in order) + (f"v{v}" if n["p"] > 1 else "")
    dims = ParallelDims.parse(f"megatron:{text}")
    assert dims.world_size == math.prod(n.values())
    assert (dims.dp, dims.tp, dims.cp, dims.pp, dims.ep) == (n["d"] * n["e"] * n["r"], n["t"], n["c"], n["p"], n["e"])
    assert dims.expert_dp * dims.ep * dims.expert_tp * dims.pp == dims.world_size
    assert ParallelDims.parse(str(dims)) == dims
    assert str(ParallelDims.parse(str(dims))) == str(dims)
    dims.check_world(dims.world_size)


@settings(deadline=None)
@given(st.data(), st.integers(1, 2), DEGREE, DEGREE, DEGREE)
def test_layout_string_with_expert_side_round_trips(data: st.DataObject, p: int, fd: int, ft: int, e: int) -> None:
    world = fd * ft * e
    t = data.draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    d = world // t
    dims = ParallelDims.parse(f"megatron:(attn:d{d}p{p}t{t}|ffn:d{fd}p{p}t{ft}e{e})")
    assert (dims.dp_shard, dims.tp, dims.expert_dp, dims.expert_tp, dims.ep) == (d, t, fd, ft, e)
    again = ParallelDims.parse(str(dims))
    assert (again.world_size, again.tp, again.ep, again.expert_tp) == (dims.world_size, t, e, ft)
    assert str(again) == str(dims)


@pytest.mark.parametrize(
    ("text", "printed", "world"),
    [
        ("fsdp:d4c2", "fsdp:d4c2", 8),
        ("fsdp:d2t2c2", "fsdp:d2t2c2", 8),
        ("fsdp:r2d2", "fsdp:d2r2", 4),
        ("fsdp:d1", "fsdp:d1", 1),
        (" fsdp : d2 ", "fsdp:d2", 2),
        ("megatron:d2p2t2", "megatron:d2p2t2", 8),
        ("megatron:p2v2", "megatron:p2v2", 2),
        ("megatron:e2d2", "megatron:d2e2", 4),
        ("megatron:(attn:d1p2t4|ffn:d1p2e4)", "megatron:(attn:d1p2t4|ffn:d1p2e4)", 8),
    ],
)
def test_documented_layouts_parse(text: str, printed: str, world: int) -> None:
    dims = ParallelDims.parse(text)
    assert str(dims) == printed
    assert dims.world_size == world


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("d4", "expected 'engine:layout', such as 'fsdp:d4c2'"),
        ("fsdp:", "expected 'engine:layout'"),
        ("fsdp:d4d2", "'d' stands twice in 'd4d2'; write it once"),
        ("fsdp:d0", "d0 is not a degree; leave 'd' out, or write d1"),
        ("fsdp:x2", "unknown letter 'x' in 'x2'; the letters are d, r"),
        ("fsdp:d", "'d' is not a row of letters with numbers"),
        ("fsdp:2d", "is not a row of letters with numbers"),
        ("fsdp:d2,c2", "is not a row of letters with numbers"),
        ("megatron:d2v2", "v2 without a pipeline"),
        ("megatron:(attn:d2t2|ffn:d2e4)", "the attn side takes 4 ranks and the ffn side 8"),
        ("megatron:(attn:d2p2|ffn:d4)", "attn has p2 and ffn has p1"),
        ("megatron:(attn:e2|ffn:d2)", "e belongs to the ffn side"),
    ],
)
def test_malformed_layout_strings_raise(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelDims.parse(text)
    with pytest.raises(ValidationError, match=message):
        TrainEngineConfig(path="model", backend=text)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"dp_shard": 0}, "dp_shard = 0: a degree is an integer of at least 1"),
        ({"tp": 2.0}, "tp = 2.0"),
        ({"dp_shard": 2, "ep": 3}, "does not divide the dense side's 2; choose ep so that it divides 2"),
    ],
)
def test_invalid_degrees_raise(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelDims(backend="fsdp", **kwargs)


@pytest.mark.parametrize(
    ("layout", "world", "fits"),
    [
        ("fsdp:d4c2", 4, "fsdp:d2c2"),
        ("fsdp:d2t2", 8, "fsdp:d4t2"),
        ("fsdp:c4", 6, "fsdp:d6"),
        ("megatron:e2d2", 2, "megatron:e2"),
        ("megatron:(attn:d1p2t4|ffn:d1p2e4)", 4, "megatron:d4"),
    ],
)
def test_wrong_world_size_raises_and_suggests_layouts(layout: str, world: int, fits: str) -> None:
    dims = ParallelDims.parse(layout)
    with pytest.raises(ValueError, match=f"'{fits}' would fit, or start {dims.world_size} processes"):
        dims.check_world(world)
    ParallelDims.parse(fits).check_world(world)


@settings(deadline=None)
@given(DEGREE, DEGREE, DEGREE, st.integers(1, 64))
def test_suggested_layouts_fit_the_world(d: int, t: int, c: int, world: int) -> None:
    dims = ParallelDims.parse(f"fsdp:d{d}t{t}c{c}")
    assume(dims.world_size != world)
    with pytest.raises(ValueError, match="would fit") as error:
        dims.check_world(world)
    ParallelDims.parse(str(error.value).split("'")[3]).check_world(world)


def test_unsupported_degrees_raise() -> None:
    with pytest.raises(ValueError, match=r"no p \(pipeline parallel\), t .*; it has d \(data parallel\), c"):
        ParallelDims.parse("fsdp:d2p2t2").check_supported(frozenset("dc"))
    with pytest.raises(ValueError, match=r"has no a separate expert side|has no e"):
        ParallelDims.parse("fsdp:(attn:d1t4|ffn:d1e4)").check_supported(frozenset("dt"))
    ParallelDims.parse("fsdp:d2c2").check_supported(frozenset("dc"))


@pytest.mark.parametrize(
    ("config", "kwargs", "message"),
    [
        (MicroBatchSpec, {"max_tokens": 3}, "max_tokens.*\n.*Extra inputs"),
        (MicroBatchSpec, {"max_tokens_per_mb": 0}, "max_tokens_per_mb.*\n.*greater than 0"),
        (MicroBatchSpec, {"overlong": "truncate"}, "overlong.*\n.*'error', 'alone' or 'drop'"),
        (OptimizerConfig, {"lr": -1.0}, "lr\n"),
        (OptimizerConfig, {"beta2": 1.0}, "beta2\n"),
        (OptimizerConfig, {"gradient_clipping": 0.0}, "gradient_clipping\n"),
        (OptimizerConfig, {"lr_scheduler": "exponential"}, "lr_scheduler\n"),
        (FSDPConfig, {"context_parallel": "ring"}, "context_parallel\n"),
        (FinetuneSpec, {"total_train_steps": 0}, "total_train_steps\n"),
        (TrainEngineConfig, {}, "path\n.*required"),
        (TrainEngineConfig, {"path": ""}, "path\n"),
        (TrainEngineConfig, {"path": "m", "temperature": 0.0}, "temperature\n"),
        (TrainEngineConfig, {"path": "m", "optim": {}}, "optim = {}: Extra inputs.*engines are fsdp, jax, megatron"),
        (
            TrainEngineConfig,
            {"path": "m", "optimizer": {"learning_rate": 1}},
            "optimizer\n.*no field 'learning_rate': did you mean 'lr'",
        ),
        (
            TrainEngineConfig,
            {"path": "m", "master_dtype": "bfloat16", "dtype": "float32"},
            "master_dtype = 'bfloat16' is narrower than dtype = 'float32'",
        ),
    ],
)
def test_invalid_config_fields_raise_and_name_the_field(
    config: type[BaseModel], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**kwargs)


@settings(deadline=None)
@given(
    st.builds(
        TrainEngineConfig,
        path=st.text(min_size=1),
        backend=st.sampled_from(["fsdp:d4c2", "fsdp:c2d2", "megatron:d2p2t2", "megatron:(attn:d1p2t4|ffn:d1p2e4)"]),
        temperature=st.floats(0.1, 10),
        mb_spec=st.builds(
            MicroBatchSpec,
            max_tokens_per_mb=st.none() | st.integers(1),
            granularity=st.integers(1, 4),
            per_sequence=st.lists(st.text()).map(tuple),
        ),
        optimizer=st.none() | st.builds(OptimizerConfig, lr=st.floats(0, 1)),
    )
)
def test_configs_round_trip_through_json(config: TrainEngineConfig) -> None:
    assert TrainEngineConfig.model_validate_json(config.model_dump_json()) == config
    assert str(config.dims) == config.backend


def test_configs_are_frozen() -> None:
    config = TrainEngineConfig(path="m")
    with pytest.raises(ValidationError, match="frozen"):
        config.path = "other"  # type: ignore[misc]


class MineConfig(BackendConfig):
    """Section of the engine of these tests."""

    depth: int = 3
    fast: bool = False

    def check_combination(self, config: TrainEngineConfig) -> None:
        if self.fast and config.dtype == "float64":
            raise ValueError("mine.fast = True with dtype = 'float64': leave it out")


class Mine:
    """The declarations of an engine that does not derive from the template."""

    supported_options: ClassVar[frozenset[str]] = frozenset({"dtype", "optimizer.lr", "mb_spec.n_mbs"})
    config_class: ClassVar[type[BackendConfig]] = MineConfig


def of_mine(**fields: Any) -> TrainEngineConfig:
    return TrainEngineConfig(path="m", backend="mine:d1", **fields)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (None, MineConfig()),
        ({}, MineConfig()),
        ({"depth": 5}, MineConfig(depth=5)),
        (MineConfig(depth=5), MineConfig(depth=5)),
    ],
)
def test_the_section_of_an_engine_is_of_its_class(section: Any, expected: MineConfig) -> None:
    config = of_mine() if section is None else of_mine(mine=section)
    made = engine_config(Mine, config)
    assert made.mine == expected
    assert engine_config(Mine, made) == made
    assert engine_config(Mine, TrainEngineConfig.model_validate_json(config.model_dump_json())) == made
    assert engine_config(Mine, TrainEngineConfig.model_validate(config.model_dump())) == made
    for copy in (pickle.loads(pickle.dumps(made)), made.model_copy(update={"mine": {"depth": expected.depth}})):
        assert engine_config(Mine, copy) == made
    assert TrainEngineConfig.model_validate_json(made.model_dump_json()).mine == expected.model_dump()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mine": {"width": 3}}, r"mine = {'width': 3}, the section of backend = 'mine:d1'.*width\n.*Extra inputs"),
        ({"mine": {"depth": "deep"}}, r"the section of backend = 'mine:d1'.*depth\n.*valid integer"),
        ({"mine": FSDPConfig(compile=True)}, r"the section of backend = 'mine:d1'.*compile\n.*Extra inputs"),
        (
            {"mine": {"fast": True}, "dtype": "float64", "master_dtype": "float64", "grad_reduce_dtype": "float64"},
            "mine.fast = True with dtype",
        ),
        (
            {"fsdp": {"compile": True}},
            "fsdp.compile = True with backend = 'mine:d1': the section of this engine is 'mine'",
        ),
        ({"megatron": MegatronConfig(bucket_size=7)}, "megatron.bucket_size = 7 with backend = 'mine:d1'"),
        ({"seed": 1}, "seed = 1 with backend = 'mine:d1': the mine engine does not support this; leave it out"),
        ({"seed": 1, "value_head": True}, "value_head = True, seed = 1 with"),
        ({"mb_spec": MicroBatchSpec(n_mbs=2, granularity=2)}, "^mb_spec.granularity = 2 with"),
        ({"optimizer": OptimizerConfig(lr=3.0, eps=0.5)}, "^optimizer.eps = 0.5 with"),
        ({"lora": LoRAConfig(rank=2)}, r"^lora = LoRAConfig\(rank=2.* with backend = 'mine:d1': the mine engine"),
    ],
)
def test_options_that_an_engine_does_not_declare_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.compile(message, re.S)):
        engine_config(Mine, of_mine(**fields))


def test_declared_options_and_sections_at_their_defaults_are_accepted() -> None:
    config = of_mine(
        dtype="float32", optimizer={"lr": 3.0}, mb_spec={"n_mbs": 2}, fsdp={"compile": False}, megatron={}, seed=0
    )
    assert engine_config(Mine, config).optimizer == OptimizerConfig(lr=3.0)


def test_an_engine_without_declarations_supports_nothing() -> None:
    class Bare:
        pass

    assert engine_config(Bare, of_mine(mine={})).mine == BackendConfig()
    for fields in ({"mine": {"depth": 1}}, {"seed": 1}, {"dtype": "float32"}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            engine_config(Bare, of_mine(**fields))


def test_a_section_must_refuse_unknown_fields() -> None:
    class Lax(BaseModel):
        pass

    class Engine:
        config_class = Lax

    with pytest.raises(TypeError, match=r"Engine.config_class = Lax: derive it from areal.api.BackendConfig"):
        engine_config(Engine, of_mine())


def test_a_subclass_reads_the_section_of_its_base_class() -> None:
    class Derived(FSDPEngine):
        pass

    with pytest.raises(
        ValueError, match=r"mine\.compile = True with backend = 'mine:d1': the section of this engine is 'fsdp'"
    ):
        engine_config(Derived, of_mine(mine={"compile": True}))
    assert engine_config(Derived, of_mine(fsdp={"compile": True})).fsdp.compile


def test_options_of_the_template_exist() -> None:
    for option in TEMPLATE_OPTIONS | FSDPEngine.supported_options:
        kind: Any = TrainEngineConfig
        for name in option.split("."):
            assert name in kind.model_fields
            kind = kind.model_fields[name].annotation
            # A group of options may be None.
            kind = next((each for each in get_args(kind) if each is not NoneType), kind)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mine": {}}, "mine = {}: Extra inputs are not permitted.*engines are fsdp, jax, megatron"),
        ({"backend": "other:d1", "mine": {}}, "engines are fsdp, jax, megatron, other"),
        ({"backend": "mine:d1", "mine": 3}, "mine = 3: the section of an engine is a mapping"),
        ({"fsdp": {"compil": True}}, "fsdp\n.*no field 'compil': did you mean 'compile'"),
        ({"fsdp": {"compile_backend": "eager"}}, "compile_backend = 'eager' without fsdp.compile"),
        ({"fsdp": {"checkpointed_share": 0.5}}, "checkpointed_share = 0.5 with activation_checkpointing = 'none'"),
        ({"lora": {}, "grad_sync": "micro_batch"}, "grad_sync = 'micro_batch' with lora"),
        (
            {"lora": {"target_modules": "x", "layer_kinds": ("head",)}},
            "layer_kinds = .* with lora.target_modules = 'x'",
        ),
        ({"lora": {}, "grad_reduce_dtype": "bfloat16"}, "grad_reduce_dtype = 'bfloat16' with lora"),
        (
            {"backend": "megatron:d1", "megatron": {"bucket_size": 7, "overlap_grad_reduce": False}},
            "bucket_size = 7 without megatron.overlap_grad_reduce",
        ),
        (
            {"backend": "megatron:d1", "megatron": {"overlap_grad_reduce": False}, "lora": {}},
            "overlap_grad_reduce = False with lora",
        ),
        ({"backend": "megatron:d1", "dtype": "float32", "master_dtype": "float64"}, "keeps parameters in float32 here"),
        (
            {"backend": "megatron:d1", "optimizer": {}, "master_dtype": "bfloat16"},
            "master_dtype = 'bfloat16' with dtype = 'bfloat16': the Megatron engine keeps parameters in float32 here",
        ),
        ({"backend": "megatron:d1", "grad_reduce_dtype": "float64"}, "reduces in float32 or dtype"),
        (
            {
                "backend": "megatron:d1",
                "optimizer": {"type": "sgd"},
                "megatron": {"overlap_param_gather": True},
            },
            "overlap_param_gather = True with optimizer.type = 'sgd'",
        ),
        (
            {
                "backend": "megatron:d1",
                "megatron": {"distributed_optimizer": False, "optimizer_state_dtype": "bfloat16"},
            },
            "optimizer_state_dtype = 'bfloat16' with megatron.distributed_optimizer = False",
        ),
        ({"optimizer": {"momentum": 0.9}}, "optimizer.momentum = 0.9 with optimizer.type = 'adamw'"),
        ({"optimizer": {"type": "sgd", "beta1": 0.8}}, "optimizer.beta1 = 0.8 with optimizer.type = 'sgd'"),
        ({"optimizer": {"min_lr_ratio": 0.1}}, "optimizer.min_lr_ratio = 0.1 with optimizer.lr_scheduler = 'constant'"),
        ({"optimizer": {"decay_ratio": 0.2}}, "optimizer.decay_ratio = 0.2 with optimizer.lr_scheduler = 'constant'"),
    ],
)
def test_settings_without_effect_are_refused_at_once(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainEngineConfig(**{"path": "m", **fields})


def test_small_dataclasses_validate_their_fields() -> None:
    with pytest.raises(ValueError, match=r"TopK\.k = 0"):
        TopK(0)
    with pytest.raises(ValueError, match="weight_format = 'gguf'"):
        SaveLoadMeta(path="x", weight_format="gguf")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep_last = 0"):
        SaveLoadMeta(path="x", keep_last=0)
    assert Metric(1.0).reduce == "mean"

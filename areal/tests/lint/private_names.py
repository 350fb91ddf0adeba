"""Private and undocumented names of other packages that the library uses, and the releases that changed them.

``areal/tests/unit/project/test_private_names.py`` checks that the installed releases have them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from areal.tests.lint.sources import ROOT, Source, Sources, run

_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState"
_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup"
_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"
_MODULE = "torch.distributed.fsdp:FSDPModule"
_STAGE = "torch.distributed.pipelining:PipelineStage"
_C10D = "torch.distributed.distributed_c10d"
_OLD = (2, 11)

# Name -> where it is defined, and the first release of torch that has it, if that is not 2.11 or older.
# Read in torch 2.11.0, 2.12.0, 2.13.0, 2.14.1 and 2.15.0. In 2.12, zero-bubble schedules also fail inside torch.
TORCH_NAMES: dict[str, tuple[str, tuple[int, int]]] = {
    # FSDP2
    "_get_fsdp_state": (_MODULE, _OLD),
    "_fsdp_param_groups": (_STATE, (2, 12)),  # before, a module has one group at most
    "_fsdp_param_group": (_STATE, _OLD),
    "_comm_ctx": (_STATE, _OLD),
    "_orig_size": (_PARAM, _OLD),
    "_unsharded_param": (_PARAM, _OLD),
    "fsdp_params": (_GROUP, _OLD),
    "_all_gather_result": (_GROUP, _OLD),
    "post_backward": (_GROUP, _OLD),
    "finalize_backward": (_GROUP, _OLD),
    "reduce_grads": (_GROUP, _OLD),
    "unsharded_accumulated_grad": (_PARAM, _OLD),
    "accumulate_unsharded_grad_if_needed": (_PARAM, _OLD),
    "to_accumulated_grad_if_needed": (_PARAM, _OLD),
    "_set_unsharded_grad_dtypes": (_GROUP, (2, 15)),
    "reset_iter_state": (_MODULE, (2, 13)),  # before, a failed micro-batch ends the engine also on one rank
    # pipelines
    "forward_maybe_with_nosync": (_STAGE, _OLD),
    "perform_reduce_grad": (_STAGE, _OLD),
    "_post_metadata_inference_cleanup": (
        _STAGE,
        (2, 12),
    ),  # 2.11 has _validate_fwd_outputs, which refuses the loss of the last stage
    # attention
    "_varlen_attn": ("torch.nn.attention.varlen", _OLD),
    "_varlen_attn_backward": ("torch.nn.attention.varlen", _OLD),
    # process groups and tensors
    "_pg_registry": ("torch.distributed.device_mesh:DeviceMesh", _OLD),
    "_new_process_group_helper": (_C10D, _OLD),
    "_world": (_C10D, _OLD),
    "_set_pg_timeout": (_C10D, _OLD),
    "_abort_process_group": (_C10D, _OLD),
    "_resolve_process_group": (_C10D, _OLD),
    "_get_backend": ("torch.distributed:ProcessGroup", _OLD),
    "all_gather_single": ("torch.distributed", (2, 13)),  # before: all_gather_into_tensor
    "reduce_scatter_single": ("torch.distributed", (2, 13)),  # before: reduce_scatter_tensor
    "_register_device_module": ("torch", _OLD),
    "_construct_storage_from_data_pointer": ("torch._C", _OLD),
    "_create_internal": ("torch._C._distributed_c10d:FakeProcessGroup", _OLD),
    "_validate_no_meta_params": (_GROUP, _OLD),
    "all_gather_outputs": (_PARAM, _OLD),
    "_schema": ("torch._ops:OpOverload", _OLD),
    "_cdata": ("torch:UntypedStorage", _OLD),
    "_type": ("torch:ScriptObject", _OLD),
    "_local_tensor": ("torch.distributed.tensor:DTensor", _OLD),
    "compute_local_shape_and_global_offset": ("torch.distributed.tensor._utils", _OLD),
    "_compute_local_shape_and_global_offset": ("torch.distributed.tensor._utils", _OLD),
    "_is_view": ("torch:Tensor", _OLD),
    "_foreach_mul_": ("torch", _OLD),
    "_foreach_norm": ("torch", _OLD),
    # modules
    "_apply": ("torch.nn:Module", _OLD),
    "_parameters": ("torch.nn:Module", _OLD),
    "_buffers": ("torch.nn:Module", _OLD),
    "_forward_pre_hooks": ("torch.nn:Module", _OLD),
    "_non_persistent_buffers_set": ("torch.nn:Module", _OLD),
    # tools
    "_pytree": ("torch.utils", _OLD),
    "_C": ("torch", _OLD),
    "_dispatch_has_kernel_for_dispatch_key": ("torch._C", _OLD),
    "_device_constructors": ("torch.utils._device", _OLD),
    "TorchDispatchMode": ("torch.utils._python_dispatch", _OLD),
    "_dynamo": ("torch", _OLD),
    "_profiler_enabled": ("torch.autograd", _OLD),
    "_dump_snapshot": ("torch.cuda.memory", _OLD),
    "_record_memory_history": ("torch.cuda.memory", _OLD),
    # operations whose results selective checkpointing keeps
    "_grouped_mm": ("torch:ops.aten", _OLD),
    "_scaled_mm": ("torch:ops.aten", _OLD),
    "_scaled_grouped_mm": ("torch:ops.aten", _OLD),
    "_linear_pointwise": ("torch:ops.mkldnn", _OLD),
    "_flash_attention_forward": ("torch:ops.aten", _OLD),
    "_scaled_dot_product_cudnn_attention": ("torch:ops.aten", _OLD),
    "_scaled_dot_product_efficient_attention": ("torch:ops.aten", _OLD),
    "_scaled_dot_product_flash_attention": ("torch:ops.aten", _OLD),
    "_scaled_dot_product_flash_attention_for_cpu": ("torch:ops.aten", _OLD),
}

# Name -> the first release of torch that does not have it any more.
TORCH_GONE = {"accumulate_unsharded_grad_if_needed": (2, 15), "to_accumulated_grad_if_needed": (2, 15)}

# Names of JAX, read in 0.10.2. They are used in `engine/jax/runtime` only, to run the coordination service in a separate process.
JAX_NAMES: dict[str, str] = {
    "_src": "jax",
    "_jax": "jaxlib",
    "global_state": "jax._src.distributed",
    "backends_are_initialized": "jax._src.xla_bridge",
    "process_id": "jax._src.distributed:State",
    "num_processes": "jax._src.distributed:State",
    "coordinator_address": "jax._src.distributed:State",
    "client": "jax._src.distributed:State",
    "get_distributed_runtime_service": "jaxlib._jax",
    "get_distributed_runtime_client": "jaxlib._jax",
}

# Names that the CPU build of torch lacks.
GPU_NAMES = {"_group_start", "_group_end"}

# Private names of transformers, Megatron-Core, torchao and the standard library. The tests of their users fail without them.
OTHER_NAMES = {
    *("_attn_implementation", "_init_weights", "_is_hf_initialized"),
    *("_keys_to_ignore_on_load_unexpected", "_no_split_modules"),
    *("_GLOBAL_MEMORY_BUFFER", "_set_global_memory_buffer", "_get_model_param_range_map"),
    *("_communicate", "_communicate_shapes"),
    *("_get_main_param_and_optimizer_states", "_set_main_param_and_optimizer_states"),
    *("_getframe", "_current_frames", "_fields"),
    *("_to_mxfp8_then_scaled_mm", "_to_fp8_rowwise_then_scaled_grouped_mm", "_to_mxfp8_then_scaled_grouped_mm"),
}

LISTED = (*TORCH_NAMES, *JAX_NAMES, *OTHER_NAMES, *GPU_NAMES)
THIS = "areal/tests/lint/private_names.py"


def names_are_listed(files: Sources) -> Iterator[str]:
    """Private names that the library reads and does not define itself."""
    known = {name for name in (*TORCH_NAMES, *JAX_NAMES) if name.startswith("_")} | OTHER_NAMES | GPU_NAMES
    own = _own_names(files) - TORCH_NAMES.keys()  # torch calls some names on our subclasses
    for source in _handwritten(files):
        for node in source.nodes:
            for name in _external_names(node):
                if name.startswith("_") and not name.startswith("__") and name not in own | known:
                    yield source.at(node.lineno, f"{name} is private to another package: list it in {THIS}")


def listed_names_are_used(files: Sources) -> Iterator[str]:
    """Listed names that the library does not use any more are removed."""
    used = {word for source in _handwritten(files) for word in re.findall(r"\w+", source.text)}
    for name in LISTED:
        if name not in used:
            yield f"{THIS}:1: no source uses {name} any more: remove it"


def _handwritten(files: Sources) -> list[Source]:
    return [source for source in files.library if not source.name.endswith("_pb2.py")]


def _own_names(files: Sources) -> set[str]:
    """Return the names that the library defines or assigns."""
    own = set()
    for source in _handwritten(files):
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.id if isinstance(node, ast.Name) else node.attr)
    return own


def _external_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("areal"):
        return [alias.name for alias in node.names]
    # The names of getattr, hasattr and setattr.
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "hasattr", "setattr")
    ):
        return [str(x.value) for x in node.args[1:2] if isinstance(x, ast.Constant)]
    return []


CHECKS = (names_are_listed, listed_names_are_used)


def offences(root: Path = ROOT) -> list[str]:
    return run(CHECKS, root)

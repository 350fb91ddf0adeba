"""Releases of torch and other packages: names that differ between them, and what an old one cannot do."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def installed_release(package: str) -> tuple[int, int]:
    """Return the first two numbers of the installed version of a package."""
    numbers = re.findall(r"\d+", version(package))
    return int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0


def require_release(package: str, needed: tuple[int, int], what: str) -> None:
    """Check that an installed package can do what was asked for.

    Args:
        package: name in the package index.
        needed: first release that can do it.
        what: the option with its value, or the layout, as the user wrote it.

    Raises:
        ValueError: the installed release is older.
    """
    if installed_release(package) < needed:
        oldest = ".".join(map(str, needed))
        raise ValueError(
            f"{what}: needs {package} {oldest} or newer, installed is {version(package)}; "
            f"pip install '{package}>={oldest}', or leave it out"
        )


# ---- names of torch

# Before torch 2.13 these have other names.
all_gather_single = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
reduce_scatter_single = (
    dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
)


def fsdp_param_groups(module: FSDPModule) -> list[Any]:
    """Return the groups of parameters that FSDP gathers together for a module. Before torch 2.12 there is one at most."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def accumulate_gradients(group: Any) -> None:
    """Add new gradients of a group of gathered parameters to their sums, in the dtype of the reduction."""
    # From torch 2.15 on, autograd adds them in place, and the sum is the gradient itself.
    if hasattr(group, "_set_unsharded_grad_dtypes"):
        group._set_unsharded_grad_dtypes(defer_upcast=False)
        return
    for parameter in group.fsdp_params:
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()


def drop_accumulated(parameter: Any) -> None:
    """Drop the sum of a gathered parameter's gradients, if torch, before 2.15, keeps it apart from the gradient."""
    if not hasattr(type(parameter), "unsharded_accumulated_grad"):
        parameter.unsharded_accumulated_grad = None


def reset_iter_state(model: Any) -> bool:
    """Reset FSDP after a failed micro-batch. Returns False if torch, before 2.13, cannot."""
    if not hasattr(model, "reset_iter_state"):
        return False
    model.reset_iter_state()
    return True

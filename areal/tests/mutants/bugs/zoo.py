"""Bugs of model families that the suite must catch: heads, probe and sharding of the zoo, and losses of experts."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import torch

from areal.tests.mutants.planting import Function, mutant

ZOO = "zoo/test_zoo.py::test_family_is_trained_correctly_or_refused[w1-{}]"
BALANCING = "dist/parallel/test_moe_layouts.py::test_balancing_losses_are_loss_terms[{}]"


# ---- heads, probe and sharding


@mutant("areal.engine.model.probe:_TinyCopy.alone", ZOO.format("electra"))
def head_not_probed(right: Function) -> Function:
    """The probe compares the head of no model."""
    return lambda self, **options: lambda: self._expected


@mutant("areal.engine.model.forward_plan:plan_forward", ZOO.format("inkling_text"))
def own_head_not_used(right: Function) -> Function:
    """A model that needs its own head gets the product with a weight."""
    return lambda *args: dataclasses.replace(right(*args), own_head=False)


@mutant("areal.engine.model.heads:LinearHead.__init__", "zoo/test_heads.py::test_probe_chooses_the_head[cohere-False]")
def head_scale_dropped(right: Function) -> Function:
    """The model's factor on its logits is dropped, so that only its own head is right."""
    return lambda self, weight, **options: right(self, weight, **{**options, "logit_scale": 1.0})


@mutant("areal.engine.model.heads:OwnHead.logits", ZOO.format("bert"))
def head_bias_dropped(right: Function) -> Function:
    """The bias of the output layer is dropped."""

    def wrong(self: Any, *args: Any) -> Any:
        head = self._hf.get_output_embeddings()
        bias, head._parameters["bias"] = head._parameters["bias"], None
        try:
            return right(self, *args)
        finally:
            head._parameters["bias"] = bias

    return wrong


@mutant("areal.engine.model.heads:_outermost", ZOO.format("mamba"))
def layers_inside_layers_sharded(right: Function) -> Function:
    """Layers inside of layers are sharded by themselves."""
    return lambda module, classes: [x for x in module.modules() if type(x).__name__ in classes]


@mutant("areal.engine.fsdp.parallelize:_without_shared", ZOO.format("roberta"))
def shared_layers_sharded(right: Function) -> Function:
    """Layers that share a parameter with another module are sharded by themselves."""
    return lambda layers, model: layers


@mutant("areal.engine.fsdp.gradients:_gather_unused", ZOO.format("git"))
def unused_layers_not_gathered(right: Function) -> Function:
    """Layers that no forward runs are not gathered before the backward."""
    return lambda modules: None


@mutant("areal.engine.model.heads:decoder_of", ZOO.format("modernbert-decoder"))
def decoder_by_name_only(right: Function) -> Function:
    """The result of get_decoder() is taken as the decoder, even if it is a linear layer."""
    return lambda hf: hf.get_decoder()


@mutant("areal.engine.model.probe:_TinyCopy.causal", ZOO.format("cpmant"))
def later_tokens_not_probed(right: Function) -> Function:
    """The probe does not check that tokens are independent of later ones."""
    return lambda self: None


# ---- balancing losses of experts


@mutant("areal.engine.moe.routing:_AddLoss.backward", BALANCING.format("fsdp:d1--whole"))
def balancing_gradient_twice(right: Function) -> Function:
    """The gradient of a balancing loss is attached twice."""

    def wrong(ctx: Any, *grads: Any) -> Any:
        grad, loss = right(ctx, *grads)
        return grad, 2 * loss

    return wrong


@mutant("areal.engine.moe.routing:Tally.add", BALANCING.format("fsdp:d1--cut"))
def recomputed_layer_counted_twice(right: Function) -> Function:
    """A layer that is recomputed is counted twice."""

    def wrong(self: Any, mb: Any, layer: int, *args: Any) -> Any:
        before = self._values.get((mb.index, layer), {})
        total = right(self, mb, layer, *args)
        values = self._values[mb.index, layer]
        self._values[mb.index, layer] = {name: value + before.get(name, 0) for name, value in values.items()}
        return total

    return wrong


@mutant("areal.engine.moe.routing:ExpertRouting.with_terms", BALANCING.format("fsdp:d1--cut"))
def balancing_divided_by_tokens(right: Function) -> Function:
    """The balancing loss is divided by tokens instead of sequences."""
    return lambda self, totals, sequences, tokens: right(self, totals, tokens, tokens)


@mutant(
    "areal.engine.moe.routing:Routing.replayed",
    "dist/parallel/test_moe_layouts.py::test_tokens_without_a_record_go_where_the_router_decides[fsdp:d2--cut]",
)
def tokens_without_a_record_take_the_first_experts(right: Function) -> Function:
    """Tokens without a record are sent to experts 0 and 1, whatever the router decides."""
    return lambda self, layer, own: right(self, layer, torch.arange(own.shape[-1]).expand_as(own))


@mutant(
    "areal.inference.protocol:Completion.after",
    "unit/inference/test_routed_experts.py::test_samples_have_the_experts_at_their_tokens",
    "dist/parallel/test_moe_layouts.py::test_experts_of_an_answer_are_replayed[w1-fsdp:d1]",
)
def experts_of_the_next_token(right: Function) -> Function:
    """Samples have the experts of an answer one token too early."""

    def wrong(self: Any, prompt: Any) -> Any:
        moved = None if self.routed_experts is None else self.routed_experts.roll(-1, 0)
        return right(replace(self, routed_experts=moved), prompt)

    return wrong


@mutant("areal.engine.moe.routing:ExpertRouting.of", BALANCING.format("fsdp:d2c2-*"))
def fillers_balanced(right: Function) -> Function:
    """Routers count the single token of a filler."""

    def wrong(self: Any, mb: Any, *args: Any, **options: Any) -> Any:
        routing = right(self, mb, *args, **options)
        if routing is not None and mb.filler:
            object.__setattr__(routing, "tally", self._tally)
        return routing

    return wrong


@mutant("areal.engine.moe.routing:Routing._all_tokens", BALANCING.format("fsdp:c2-*"))
def balanced_by_ranks_own_tokens(right: Function) -> Function:
    """Each context-parallel rank balances its local tokens only, multiplied by the number of ranks."""

    def wrong(self: Any, x: torch.Tensor) -> torch.Tensor:
        copies = -(-self.mb.n_tokens // len(x))
        return torch.cat([x] * copies)[: self.mb.n_tokens]

    return wrong


@mutant(
    "areal.engine.jax.inputs:StreamInputs._replayed",
    "dist/parallel/test_moe_layouts.py::test_shared_prefix_counts_per_sequence_in_routers[jax:d1-]",
)
def experts_of_packed_tokens_in_a_tree(right: Function) -> Function:
    """With shared prefixes, the tokens of the tree get the experts of the packed tokens at their places."""

    def wrong(self: Any, length: int, shape: Any) -> Any:
        out = right(self, length, shape)
        if self._mb.tree is not None:
            n = len(self._mb.tree)
            out[:n] = self._experts[:n].numpy()
        return out

    return wrong


@mutant(
    "areal.trainer.mismatch:mismatch",
    "dist/recipes/test_server_recipes.py::test_experts_of_the_servers_are_replayed[fsdp:d1]",
)
def mismatch_without_replay_with_replay(right: Function) -> Function:
    """The log-probs that are to be without replay are those with it."""

    def wrong(engine: Any, samples: Any, **options: Any) -> Any:
        scalars = right(engine, samples, **options)
        return scalars | {f"{name}_without_replay": value for name, value in scalars.items()}

    return wrong

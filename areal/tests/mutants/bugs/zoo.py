"""Bugs in heads, probe and sharding of untested families that the sample of the zoo must catch."""

from __future__ import annotations

import dataclasses
from typing import Any

from areal.tests.mutants.planting import Function, mutant

ZOO = "zoo/test_zoo.py::test_family_is_trained_correctly_or_refused[w1-{}]"


@mutant("areal.engine.attention.probe:_TinyCopy.alone", ZOO.format("electra"))
def head_not_probed(right: Function) -> Function:
    """The probe compares the head of no model."""
    return lambda self, **options: lambda: self._expected


@mutant("areal.engine.attention.huggingface:plan_forward", ZOO.format("inkling_text"))
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


@mutant("areal.engine.fsdp.parallelize:_outermost", ZOO.format("mamba"))
def layers_inside_layers_sharded(right: Function) -> Function:
    """Layers inside of layers are sharded by themselves."""
    return lambda module, classes: [x for x in module.modules() if type(x).__name__ in classes]


@mutant("areal.engine.fsdp.parallelize:_without_shared", ZOO.format("roberta"))
def shared_layers_sharded(right: Function) -> Function:
    """Layers that share a parameter with another module are sharded by themselves."""
    return lambda layers, model: layers


@mutant("areal.engine.fsdp.gradients:_gather_unused", ZOO.format("mllama"))
def unused_layers_not_gathered(right: Function) -> Function:
    """Layers that no forward runs are not gathered before the backward."""
    return lambda modules: None


@mutant("areal.engine.model.decoder:decoder_of", ZOO.format("modernbert-decoder"))
def decoder_by_name_only(right: Function) -> Function:
    """The result of get_decoder() is taken as the decoder, even if it is a linear layer."""
    return lambda hf: hf.get_decoder()


@mutant("areal.engine.attention.probe:_TinyCopy.causal", ZOO.format("cpmant"))
def later_tokens_not_probed(right: Function) -> Function:
    """The probe does not check that tokens are independent of later ones."""
    return lambda self: None

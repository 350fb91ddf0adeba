"""TRL's GRPO with the model step on an engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

from areal.api import MicroBatch, MicroBatchSpec, SaveLoadMeta, StepSettings, TokenOutputs, TrainEngine
from areal.inference.protocol import Completion, Sampling
from areal.integrations.trl.checks import check
from areal.trainer.ppo import Sync
from areal.utils.data.sequences import from_prompt_response, to_responses
from areal.utils.seeding import mixed

_UNSUPPORTED = (
    "beta",
    "use_vllm",
    "use_transformers_continuous_batching",
    "generation_kwargs",
    "cache_implementation",
    "min_p",
    "repetition_penalty",
    "model_init_kwargs",
    "cast_lm_head_to_fp32",
    "disable_dropout",
    "use_liger_kernel",
    "neftune_noise_alpha",
    "weight_decay",
    "optim",
    "fp16",
)
_OF_A_MODEL = {"tools", "environment_factory", "peft_config", "quantization_config", "optimizers"}


class EngineGRPOTrainer(GRPOTrainer):
    """``GRPOTrainer`` whose forward, backward and optimizer step run on an engine, and whose answers come from a rollout engine.

    TRL gets a placeholder of one number in place of the model. Its losses, advantages, data order and schedule are unchanged.

    Args:
        engine: the policy, initialized; each process is one data-parallel rank.
        rollout: generates the answers, unless ``options`` has TRL's ``rollout_func``.
        sync: sends the engine's weights to ``rollout``; the version is the number of steps.
        args: configuration of TRL.
        options: further arguments of ``GRPOTrainer``, such as ``reward_funcs`` and ``train_dataset``.

    Raises:
        ValueError: an option of ``args`` or of the engine is not supported.
    """

    def __init__(self, engine: TrainEngine, rollout: Any, sync: Sync, *, args: GRPOConfig, **options: Any) -> None:
        dtype, ranks = engine.config.dtype, engine.dp_size
        rules = {
            "save_strategy": (
                args.save_strategy == "no",
                "TRL has no model to save: set it to 'no', and call save_model()",
            ),
            "bf16": (args.bf16 == (dtype == "bfloat16"), f"TrainEngineConfig.dtype is {dtype!r}: change one of them"),
            "world_size": (args.world_size == ranks, f"it must be {ranks}, the data-parallel ranks of the engine"),
        }
        check(args, _UNSUPPORTED, rules)
        for name in sorted(_OF_A_MODEL & options.keys()):
            raise ValueError(f"{name} = {options[name]!r}: it needs TRL's model; leave it out")
        self.engine, self._rollout, self._sync = engine, rollout, sync
        self._outputs: list[Tensor] | None = None
        options.setdefault("rollout_func", self._generate_answers)
        super().__init__(Placeholder(AutoConfig.from_pretrained(engine.config.path)), args=args, **options)
        if self.aux_loss_enabled:
            raise ValueError(f"GRPOConfig.router_aux_loss_coef = {args.router_aux_loss_coef}: set it to 0")

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Tensor:
        """Compute TRL's loss. In training, the engine adds its gradient to the pending ones."""
        if not torch.is_grad_enabled():
            return super().compute_loss(model, inputs, *args, **options)
        columns = [inputs[f"{each}_{kind}"] for each in ("prompt", "completion") for kind in ("ids", "mask")]

        def process(outputs: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, Tensor]:
            # Split the packed tokens into rows, in the order of TRL's samples.
            order = sorted(range(len(mb.sample_ids)), key=mb.sample_ids.__getitem__)
            packed = [x.split(mb.seqlens) for x in (outputs.logprobs, outputs.entropy) if x is not None]
            rows = [pad_sequence([each[i] for i in order], batch_first=True) for each in packed]
            self._outputs = [to_responses(each, columns[1], columns[3]) for each in rows]
            loss = GRPOTrainer.compute_loss(self, model, inputs)
            # Gradients are sums over processes here, and means in TRL.
            return loss / self.args.world_size, loss.detach()

        try:
            # TRL's loss takes all samples of the process at once.
            mbs = self.engine.microbatches(self._batch(columns), mb_spec=MicroBatchSpec())
            (loss,) = self.engine.forward_backward_batch(mbs, process, outputs=("logprobs", "entropy"))
        finally:
            self._outputs = None
        return loss.clone().requires_grad_()  # for TRL's call of backward(), which does nothing more

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, None]:
        """Return log-probs and entropies of the answers, from the forward under way or a new one."""
        if self._outputs is not None:
            return self._outputs[0], self._outputs[1], None
        split = [input_ids.shape[1] - logits_to_keep, logits_to_keep]
        (prompts, answers), (prompt_mask, mask) = input_ids.split(split, 1), attention_mask.split(split, 1)
        batch = self._batch([prompts, prompt_mask, answers, mask])
        found = self.engine.forward_batch(batch, outputs=("logprobs", "entropy"))
        logprobs, entropy = (to_responses(each, prompt_mask, mask) for each in found.values())
        return logprobs, entropy, None

    def _batch(self, columns: list[Tensor]) -> dict[str, Tensor]:
        """Return a batch of the engine: ids and mask of prompts, then of answers."""
        return from_prompt_response(*columns) | {"temperature": torch.full((len(columns[0]),), self.temperature)}

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Return the engine's optimizer."""
        self.optimizer = EngineOptimizer(self.engine, self.model.parameters(), self.args, self._metrics["train"])
        return self.optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the engine's weights for transformers. Collective."""
        self.engine.save(SaveLoadMeta(output_dir or self.args.output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        raise ValueError(f"resume_from_checkpoint = {resume_from_checkpoint!r}: call engine.load() before train()")

    def _generate_answers(self, prompts: list[Any], _: Any) -> dict[str, Any]:
        """Generate an answer to each prompt with the engine's weights."""
        self._sync(self.engine, self.state.global_step)
        template = {"add_generation_prompt": True, "return_dict": False, **self.chat_template_kwargs}
        text, chat = self.processing_class, self.processing_class.apply_chat_template
        prompt_ids = [text(x)["input_ids"] if isinstance(x, str) else chat(x, **template) for x in prompts]
        answers = asyncio.run(self._answers(prompt_ids))
        ids, logprobs = [list(each.tokens) for each in answers], [list(each.logprobs) for each in answers]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logprobs}

    async def _answers(self, prompt_ids: list[list[int]]) -> list[Completion]:
        """Generate answers concurrently. Seeds depend on ``args.seed``, micro-batch, process and prompt."""
        end, client = tuple(self.eos_token_ids), self._rollout
        sampling = Sampling(self.max_completion_length, self.temperature, self.top_p, self.top_k, end)
        key = (self.args.seed, self._step, self.accelerator.process_index)
        requests = [(ids, replace(sampling, seed=mixed(*key, number))) for number, ids in enumerate(prompt_ids)]
        return await asyncio.gather(*(client.generate(*request) for request in requests))


class Placeholder(PreTrainedModel):
    """Model of one number, with the configuration of the engine's model."""

    supports_gradient_checkpointing = True
    gradient_checkpointing = False  # set by TRL, without effect: the engine has its own

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.number = nn.Parameter(torch.zeros(()))
        try:
            self.generation_config = GenerationConfig.from_pretrained(str(config.name_or_path))
        except OSError:
            self.generation_config = GenerationConfig.from_model_config(config)


class EngineOptimizer(torch.optim.Optimizer):
    """Optimizer of an engine, with the settings of TRL and the learning rate of its schedule."""

    def __init__(self, engine: TrainEngine, parameters: Any, args: GRPOConfig, metrics: dict[str, list[float]]) -> None:
        super().__init__(parameters, {"lr": args.learning_rate})
        betas, clipping = (args.adam_beta1, args.adam_beta2), args.max_grad_norm or float("inf")
        self._engine, self._metrics = engine, metrics
        self._settings = StepSettings(None, betas, args.adam_epsilon, 0.0, clipping)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step with the pending gradients."""
        stats = self._engine.optimizer_step(replace(self._settings, lr=self.param_groups[0]["lr"]))
        self._metrics["grad_norm"].append(stats.grad_norm)

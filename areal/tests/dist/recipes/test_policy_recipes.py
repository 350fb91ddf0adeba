"""GRPO and PPO from a few settings: equal to the long script in bits, the same on every layout, and resumed."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal.api import FinetuneSpec, MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.chat import Chat
from areal.engine.registry import create_engine
from areal.inference import Completion, LocalRollout, Sampling
from areal.recipes import GRPOConfig, GRPORun, distill, grpo, ppo
from areal.tests.dist.recipes.policy_runs import REWARDS, SMALL, curve, curve_of_one_process, evaluated_run
from areal.tests.harness import tiny
from areal.tests.harness.recipes.recipe_data import recipe_model, reward, rows, save_model
from areal.tests.harness.rl import Curve
from areal.trainer.advantages import rloo
from areal.trainer.estimators import GroupRelative
from areal.trainer.grpo import grpo_trainer
from areal.trainer.losses import grpo_objective
from areal.trainer.rollout import Plan, Runner, SingleTurn

NUMBERS = ("rollout/reward", "actor/loss", "actor/grad_norm")


def long_script(backend: str) -> Curve:
    """Return the numbers of the same run from the objects of the library."""
    data, path = rows(24), recipe_model()
    chat = Chat(AutoTokenizer.from_pretrained(path))

    def prompt(row: dict[str, Any]) -> list[int]:
        return chat.prompt([{"role": "user", "content": row["prompt"]}])

    def judge(row: dict[str, Any], completion: Any) -> float:
        return reward(row, chat.parse(completion.tokens).content)

    config = TrainEngineConfig(
        path=path,
        backend=backend,
        dtype="float32",
        mb_spec=MicroBatchSpec(max_tokens_per_mb=512, share_prefixes=True),
        optimizer=OptimizerConfig(lr=3e-3),
    )
    numbers = Curve()
    with ExitStack() as stack:
        engine = stack.enter_context(create_engine(config))
        engine.initialize(FinetuneSpec(total_train_steps=3))
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
        context = max(len(prompt(row)) for row in data) + 5
        rollout = stack.enter_context(LocalRollout(model.eval(), max_context=context))
        episode = SingleTurn(prompt, judge, Sampling(5, stop_token_ids=chat.stop_token_ids))
        runner = Runner(rollout, episode, data, Plan(groups=4, group_size=4))
        stack.callback(runner.close)

        def sync(source: Any, version: int) -> None:
            rollout.update(source.named_tensors(), version)

        trainer = grpo_trainer(
            engine,
            runner,
            sync,
            objective=grpo_objective(kl_coef=0.0, report_entropy=True),
            estimator=GroupRelative(),
            tracker=numbers,
        )
        trainer.train(3)
    return numbers


@pytest.mark.parametrize("backend", tiny.chosen("fsdp:d1", "fsdp:d2"))
def test_recipe_equals_the_long_script_in_bits(backend: str, tmp_path: Path) -> None:
    grpo(recipe_model(), rows(24), reward, backend=backend, output=tmp_path, **SMALL).train()
    expected = long_script(backend)
    got = curve(tmp_path, NUMBERS)
    assert got == {name: list(expected[name]) for name in NUMBERS}
    assert len(got["actor/loss"]) == 3
    assert max(got["actor/grad_norm"]) > 0


@pytest.mark.parametrize("backend", tiny.chosen("fsdp:d1"))
def test_replica_rounds_as_the_trainer(backend: str, tmp_path: Path) -> None:
    """Weights alone are rounded: inputs at the border of two numbers would round by their last bit."""
    engine = {**SMALL.get("engine", {}), "fsdp": {"quantization": {"format": "int4", "group_size": 4}}}
    settings = {**SMALL, "steps": 2, "engine": engine}
    grpo(recipe_model(), rows(24), reward, backend=backend, output=tmp_path, **settings).train()
    assert max(curve(tmp_path, ("rollout/logprob_error",))["rollout/logprob_error"]) < 1e-5


@pytest.mark.parametrize("backend", tiny.chosen("fsdp:d2", "megatron:t2", "jax:d2"))
def test_one_run_on_every_layout(backend: str, tmp_path: Path) -> None:
    """Rewards are those of the answers that one process samples, and evaluations are equal on all ranks."""
    expected = curve_of_one_process()
    run = evaluated_run(backend, recipe_model(), tmp_path)
    run.train()
    got = curve(tmp_path, REWARDS)
    assert got["rollout/reward"] == pytest.approx(expected["rollout/reward"], abs=1e-6)
    assert got["eval/reward"] == pytest.approx(expected["eval/reward"], abs=1e-6)
    assert len(set(got["rollout/reward"])) == 3
    assert max(curve(tmp_path, ("rollout/logprob_error",))["rollout/logprob_error"]) < 1e-5
    assert list(run.results.by_step) == [0, 2, 3]
    assert [its["eval/reward"] for its in run.results.by_step.values()] == got["eval/reward"]


@pytest.mark.parametrize("backend", tiny.chosen("fsdp:d2"))
def test_resumed_run_continues_the_curve(backend: str, tmp_path: Path) -> None:
    settings = {**SMALL, "steps": 4, "checkpoint_every": 2, "eval_every": 2}

    def run(output: Path, **changes: Any) -> Any:
        return grpo(
            recipe_model(),
            rows(24),
            reward,
            evaluation=rows(4, 1),
            backend=backend,
            output=output,
            **settings | changes,
        )

    run(tmp_path / "full").train()
    run(tmp_path / "parts", steps=2).train()
    with pytest.raises(ValueError, match="has checkpoints, such as step-000002: set resume = true"):
        run(tmp_path / "parts")
    with pytest.raises(ValueError, match=r"group_size = 2, and the run in .* began with 4"):
        run(tmp_path / "parts", resume=True, group_size=2)
    resumed = run(tmp_path / "parts", resume=True)
    resumed.train()
    names = ("rollout/reward", "actor/loss", "eval/reward")
    assert curve(tmp_path / "parts", names) == curve(tmp_path / "full", names)
    assert list(resumed.results.by_step) == [0, 2, 4]


@pytest.mark.parametrize("backend", tiny.chosen("fsdp:d1"))
def test_ppo_trains_policy_and_critic(backend: str, tmp_path: Path) -> None:
    settings = {**SMALL, "groups": 8, "group_size": 1, "kl_coef": 0.01}
    ppo(recipe_model(), rows(24), reward, backend=backend, output=tmp_path, **settings).train()
    got = curve(tmp_path, ("actor/grad_norm", "critic/loss", "rollout/reward"))
    assert len(got["critic/loss"]) == 3
    assert min(got["actor/grad_norm"]) > 0
    assert min(got["critic/loss"]) > 0


@pytest.mark.parametrize("backend", tiny.chosen("fsdp:d1", "fsdp:d2"))
def test_distillation_approaches_the_teacher(backend: str, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    if torch.distributed.get_rank() == 0:
        save_model(teacher, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2)
    torch.distributed.barrier()
    settings = {**SMALL, "steps": 16, "groups": 24, "group_size": 1, "lr": 5e-3}
    run = distill(recipe_model(), rows(24), str(teacher), backend=backend, output=tmp_path / "run", **settings)
    run.train()
    got = curve(tmp_path / "run", ("actor/kl_ref/k1", "rollout/reward", "actor/policy/advantage"))
    divergence = got["actor/kl_ref/k1"]
    assert divergence[0] > 0.2
    assert sum(divergence[-4:]) < 0.7 * sum(divergence[:4])
    # On policy, the mean advantage is the negative divergence, and without a reward there is none.
    assert got["actor/policy/advantage"] == pytest.approx([-value for value in divergence], abs=1e-5)
    assert set(got["rollout/reward"]) == {0.0}


@pytest.mark.parametrize("backend", tiny.chosen("fsdp:d1"))
def test_rows_for_evaluation_need_a_reward(backend: str, tmp_path: Path) -> None:
    """Any reward: a lambda has no name that the settings could record."""

    def run(name: str, *reward: Any, **settings: Any) -> Any:
        run = distill(
            recipe_model(),
            rows(24),
            recipe_model(),
            *reward,
            backend=backend,
            output=tmp_path / name,
            **SMALL,
            **settings,
        )
        return run.build()

    assert run("measured", lambda row, answer: 1.0, held_out=4).held_out is not None
    for name, settings in (("held_out", {"held_out": 4}), ("evaluation", {"evaluation": rows(4, 1)})):
        with pytest.raises(ValueError, match="held_out or evaluation without reward: an evaluation measures it"):
            run(name, **settings)


TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def double(number: int) -> int:
    """Double a number.

    Args:
        number: any.
    """
    return 2 * number


@pytest.mark.parametrize("backend", tiny.chosen("fsdp:d1"))
def test_tools_make_episodes_of_turns(backend: str, tmp_path: Path) -> None:
    """A stand-in for the model calls the tool, and its reward sees the conversation."""
    (tmp_path / "template.jinja").write_text(TOOLS)
    seen: list[Any] = []

    def judge(row: Any, answer: str, messages: Any) -> float:
        seen.append([message["role"] for message in messages])
        return float("tool" in seen[-1])

    class Caller:
        """Writes a call, and then an answer; each second episode answers at once."""

        version, count = 0, 0

        async def generate(self, prompt_ids: Any, sampling: Any) -> Completion:
            text = run.chat.template.tokenizer.decode(prompt_ids)
            self.count += 1
            call = '<tool_call>{"name": "double", "arguments": {"number": 4}}</tool_call>'
            answer = "8" if "tool\n8" in text or self.count % 2 else call
            tokens = (*run.chat.template.tokenizer(f"{answer}<|im_end|>")["input_ids"],)
            ids = torch.tensor([*prompt_ids, *tokens])
            (logprobs,) = run.engine.forward_batch([{"input_ids": ids}])
            mine = logprobs[len(prompt_ids) - 1 : len(ids) - 1].tolist()
            return Completion(tokens, (*mine,), (self.version,) * len(tokens), "stop", sampling)

    config = GRPOConfig(
        model=recipe_model(),
        backend=backend,
        output=tmp_path / "run",
        chat_template=str(tmp_path / "template.jinja"),
        max_turns=3,
        max_episode_tokens=200,
        **{**SMALL, "max_new_tokens": 80, "steps": 1},
    )
    rollout: Any = Caller()
    run = GRPORun(
        config,
        rows(8),
        judge,
        tools=[double],
        rollout=rollout,
        sync=lambda engine, version: setattr(rollout, "version", version),
    )
    run.train()
    got = curve(tmp_path / "run", ("rollout/turns", "rollout/tool_calls", "rollout/tool_errors", "rollout/reward"))
    assert got["rollout/tool_errors"] == [0.0]
    assert 0 < got["rollout/tool_calls"][0] < 1
    assert got["rollout/turns"][0] == 1 + got["rollout/tool_calls"][0]
    assert got["rollout/reward"] == got["rollout/tool_calls"]
    assert ["user", "assistant", "tool", "assistant"] in seen
    with pytest.raises(ValueError, match="max_turns = 3 without tools: an episode has one answer"):
        GRPORun(config.model_copy(update={"output": tmp_path / "other"}), rows(8), reward)


@pytest.mark.parametrize("backend", tiny.chosen("fsdp:d1"))
def test_first_answer_with_tools_has_room_in_the_context(backend: str, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(TOOLS)

    def run(**settings: Any) -> GRPORun:
        config = GRPOConfig(
            model=recipe_model(),
            backend=backend,
            output=tmp_path / "run",
            chat_template=str(tmp_path / "template.jinja"),
            **{**SMALL, **settings},
        )
        return GRPORun(config, rows(8), reward, tools=[double])

    for settings, message in (
        ({"max_new_tokens": 255}, r"with max_new_tokens = 255 that is \d+, and the model's context is 256: leave out"),
        ({"max_new_tokens": 999, "max_episode_tokens": 254}, "with max_episode_tokens = 254 that is"),
        (
            {"max_context": 10},
            "with max_new_tokens = 5 that is .* and max_context is 10: raise it, leave out long rows",
        ),
        ({"max_context": 257}, "max_context = 257: the model's context is 256; lower the number"),
    ):
        with pytest.raises(ValueError, match=message):
            run(**settings)
    # The limit of an episode is that of its first answer, too, and a later one may find less room.
    assert run(max_new_tokens=999, max_episode_tokens=100, max_context=200)._max_context == 200
    assert run(max_new_tokens=100)._max_context == 256


@pytest.mark.parametrize("backend", tiny.chosen("fsdp:d1"))
def test_penalty_of_length_is_refused_with_several_answers(backend: str, tmp_path: Path) -> None:
    """It compares the tokens of an episode with the limit of one answer."""
    config = GRPOConfig(model=recipe_model(), backend=backend, output=tmp_path, overlong_tokens=4, **SMALL)
    episode: Any = SingleTurn(lambda row: [1], lambda row, answer: 1.0, Sampling(5))
    for with_what, parts in (("tools", {"tools": [double]}), ("an episode", {"episode": episode})):
        with pytest.raises(ValueError, match=f"overlong_tokens = 4 with {with_what}: the penalty is of one answer"):
            GRPORun(config, rows(8), reward, **parts)


@pytest.mark.parametrize("backend", tiny.chosen("fsdp:d1"))
@pytest.mark.parametrize("setting", [{"overlong_tokens": 4}, {"shuffle_rewards": True}], ids=str)
def test_shaping_is_refused_with_an_own_estimator(setting: dict[str, Any], backend: str, tmp_path: Path) -> None:
    config = GRPOConfig(model=recipe_model(), backend=backend, output=tmp_path, **setting, **SMALL)
    [(name, value)] = setting.items()
    with pytest.raises(ValueError, match=f"{name} = {value} with an estimator: .* leave {name} out"):
        GRPORun(config, rows(8), reward, estimator=GroupRelative(rloo))


@pytest.mark.parametrize("backend", tiny.chosen("fsdp:d1"))
def test_settings_reach_their_places(backend: str, tmp_path: Path) -> None:
    """A penalty of length, masked truncations, a control with shuffled rewards, and parts that are passed."""
    config = GRPOConfig(
        model=recipe_model(),
        backend=backend,
        output=tmp_path,
        overlong_tokens=4,
        shuffle_rewards=True,
        engine={"activation_checkpointing": "full"},
        **SMALL,
    )
    numbers = Curve()
    with GRPORun(config, rows(8), reward, tracker=numbers).build() as run:
        assert run.engine.config.activation_checkpointing == "full"
        samples = [
            {
                "loss_mask": torch.tensor([0.0] * 3 + [1.0] * length),
                "group_ids": torch.tensor(0),
                **sampled,
            }
            # The last one has tokens that are too old to train on.
            for length, sampled in ((1, {}), (3, {}), (2, {"sampled_tokens": torch.tensor(5)}))
        ]
        shape: Any = run.trainer.estimator.shape
        # Full penalty at 5 tokens, half of it at 3; then in another order.
        assert sorted(shape(torch.ones(3), samples).tolist()) == pytest.approx([0.0, 0.5, 1.0])
        run.trainer.train(1)
    assert len(numbers["rollout/reward"]) == 1

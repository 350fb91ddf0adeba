"""Every method of a training client."""

from __future__ import annotations

from typing import Any

from common import (
    ADAM,
    COMPLETE,
    NEW,
    datum,
    fails,
    flat,
    logprobs,
    np,
    resumed,
    same,
    service,
    tinker,
    torch,
    trainer,
    types,
)


def check_losses(client: Any) -> None:
    """Each loss returns its log-probs, and the sum that its formula gives."""
    length = 9
    rng = np.random.default_rng(0)
    plain = datum(1, length)
    base = flat(client.forward([plain], "cross_entropy").result())
    weights = rng.normal(size=length).astype(np.float32)
    old = (base + rng.normal(size=length) * 0.3).astype(np.float32)
    advantages = rng.normal(size=length).astype(np.float32)
    ratio = np.exp(base - old)
    clipped = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    sequence = np.exp(np.mean(base - old))
    policy = {"logprobs": old, "advantages": advantages}
    cases = {
        "cross_entropy": ({"weights": weights}, None, -(base * weights).sum()),
        "importance_sampling": (policy, None, -(ratio * advantages).sum()),
        "ppo": (policy, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, -clipped.sum()),
        "cispo": (
            policy,
            {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1},
            -(np.clip(ratio, 0.5, 1.1) * base * advantages).sum(),
        ),
        "dro": (policy, {"beta": 0.1}, -(base * advantages - 0.05 * (base - old) ** 2).sum()),
        "gspo": (
            {**policy, "sequence_ratio_mask": np.ones(length, np.float32)},
            {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
            -np.minimum(sequence * advantages, np.clip(sequence, 0.9, 1.1) * advantages).sum(),
        ),
    }
    for name, (inputs, config, expected) in cases.items():
        if name == "gspo" and not NEW:
            continue
        output = client.forward_backward([datum(1, length, **inputs)], name, config).result()
        same(flat(output), base)
        same(output.metrics["loss:sum"], expected, 1e-4)


def check_shapes(client: Any) -> None:
    """Targets of several columns, dense and sparse, equal each column alone."""
    length, columns = 6, 4
    first = datum(2, length)
    tokens = first.model_input
    targets = np.random.default_rng(0).integers(3, 100, (length, columns))
    weights = np.zeros((length, columns), np.float32)
    weights[np.arange(length), np.arange(length) % columns] = 0.5
    given = types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": targets, "weights": weights})
    dense = client.forward([given], "cross_entropy").result()
    assert [array.shape for array in logprobs(dense)] == [(length, columns)]
    if COMPLETE:
        # The SDK sends tensors of torch as sparse ones if that is smaller.
        kept = {"target_tokens": torch.tensor(targets * (weights != 0)), "weights": torch.tensor(weights)}
        given = types.Datum(model_input=tokens, loss_fn_inputs=kept)
        assert given.loss_fn_inputs["weights"].sparse_crow_indices is not None
        sparse = client.forward([given], "cross_entropy").result()
        same(dense.metrics["loss:sum"], sparse.metrics["loss:sum"])
    for column in range(columns):
        inputs = {"target_tokens": targets[:, column], "weights": np.ones(length, np.float32)}
        alone = client.forward([types.Datum(model_input=tokens, loss_fn_inputs=inputs)], "cross_entropy").result()
        same(logprobs(dense)[0][:, column], flat(alone))


def check_chunks(client: Any, count: int) -> None:
    """Several requests of one call, of which the first arrives last, give outputs in order and one sum."""
    data = [datum(seed, 2 + seed % 3) for seed in range(count)]
    together = client.forward_backward(data, "cross_entropy").result()
    assert [len(array) for array in logprobs(together)] == [2 + seed % 3 for seed in range(count)]
    same(together.metrics["loss:sum"], -flat(together).sum(), 1e-4)
    for index in (0, count // 2, count - 1):
        same(logprobs(together)[index], flat(client.forward([data[index]], "cross_entropy").result()))


def check_custom_loss(client: Any) -> None:
    """A loss of the client equals the loss of the engine, in value and in the step that follows."""
    data = [datum(seed, 5) for seed in range(3)]

    def negative_sum(given: Any, values: Any) -> Any:
        return -torch.stack([value.sum() for value in values]).sum(), {"custom:mean": 1.0}

    engine, custom = trainer(client), trainer(client)
    expected = engine.forward_backward(data, "cross_entropy").result()
    actual = custom.forward_backward_custom(data, negative_sum).result()
    assert actual.metrics["custom:mean"] == 1.0
    if NEW:
        same(actual.metrics["loss:sum"], expected.metrics["loss:sum"], 1e-6)
    for each in (engine, custom):
        each.optim_step(ADAM).result()
    after = [flat(each.forward(data, "cross_entropy").result()) for each in (engine, custom)]
    same(after[0], after[1], 1e-6)
    assert np.abs(after[0] - flat(expected)).max() > 1e-3


def steps(client: Any, count: int, start: int = 0) -> list[bytes]:
    """Train, and return the bytes of the log-probs of each step. Requests are sent before the results are awaited."""
    futures = []
    for step in range(start, start + count):
        data = [datum(100 + step, 7), datum(200 + step, 4)]
        settings = types.AdamParams(
            learning_rate=1e-2 / (1 + step), eps=1e-8, weight_decay=0.01 * (step % 2), grad_clip_norm=float(step % 3)
        )
        futures.append((client.forward_backward(data, "cross_entropy"), client.optim_step(settings)))
    results = [(forward.result(), step.result()) for forward, step in futures]
    return [flat(forward).tobytes() for forward, _ in results]


def check_resume(client: Any) -> tuple[str, list[bytes]]:
    """Ten steps after a resume with the optimizer equal those of the model that went on, to the bit."""
    model = trainer(client, seed=11)
    steps(model, 3)
    saved = model.save_state("state", ttl_seconds=3600).result().path
    assert saved.startswith("tinker://")
    assert saved.endswith("/weights/state")
    went_on = steps(model, 10, 3)
    again = resumed(client, saved)
    assert again.get_info().model_data.model_name == "tiny"
    assert steps(again, 10, 3) == went_on
    # Without the optimizer: the same weights, other steps.
    fresh = resumed(client, saved, optimizer=False)
    other = steps(fresh, 3, 3)
    assert other[0] == went_on[0]
    assert other[2] != went_on[2]
    # Into a model that exists, as its first request.
    loaded = trainer(client, seed=12)
    loaded.load_state_with_optimizer(saved).result()
    assert steps(loaded, 2, 3) == went_on[:2]
    fails(tinker.RequestFailedError, "state", lambda: model.save_state("state").result())
    again = model.save_state("other").result().path
    assert model.save_state("other", overwrite=True).result().path == again
    return saved, went_on


def check_errors(client: Any, service_client: Any) -> None:
    """A request that is wrong fails with the category ``user``, and the next one of its model runs."""

    def wrong(data: Any, text: str, loss: str = "cross_entropy", config: Any = None) -> None:
        error = fails(tinker.RequestFailedError, text, lambda: client.forward_backward([data], loss, config).result())
        assert error.category == types.RequestErrorCategory.User, error

    length = 3
    wrong(datum(1, length, weights=np.ones(length + 1, np.float32)), "weights")
    wrong(datum(1, length, weights=np.full(length, np.nan, np.float32)), "weights")
    wrong(datum(1, length, target_tokens=np.full(length, 9999), weights=np.ones(length, np.float32)), "9999")
    wrong(datum(1, length, advantages=np.ones(length, np.float32)), "logprobs", "importance_sampling")
    wrong(datum(1, length), "unknown_key", "cross_entropy", {"unknown_key": 1.0})
    if NEW:
        wrong(datum(1, length), "stable_reinforce", "stable_reinforce")
    bad_step = fails(
        tinker.RequestFailedError,
        "learning_rate",
        lambda: client.optim_step(types.AdamParams(learning_rate=-1.0)).result(),
    )
    assert bad_step.category == types.RequestErrorCategory.User
    # What JSON can hold and the database cannot. The next request of the model must not wait for it.
    bad_name = fails(tinker.RequestFailedError, "NUL", lambda: client.save_state("a\0b").result())
    assert bad_name.category == types.RequestErrorCategory.User
    fails(tinker.RequestFailedError, "rank", lambda: trainer(service_client, rank=10**6))
    fails(tinker.TinkerError, "other-model", lambda: trainer(service_client, base_model="other-model"))
    client.forward_backward([datum(1, length)], "cross_entropy").result()
    client.optim_step(ADAM).result()


def run_all() -> dict[str, Any]:
    """Run all checks of this file."""
    client = service(**({"fwdbwd_max_chunk_len": 4} if NEW else {}))
    model = trainer(client)
    info = model.get_info()
    assert info.lora_rank == 4
    check_losses(model)
    check_shapes(model)
    if COMPLETE:
        tokenizer = model.get_tokenizer()
        assert tokenizer.encode("ab") == tokenizer.encode("a") + tokenizer.encode("b")
        check_chunks(model, 19 if NEW else 1030)
        check_custom_loss(client)
    check_errors(model, client)
    saved, went_on = check_resume(client)
    if not NEW:
        # The JSON forms give the same results, and a checkpoint is loaded by two requests.
        flags = {"proto_write_fwdbwd": False, "fwd_via_fwdbwd": False, "create_model_via_load_weights": False}
        plain = service(**flags)
        check_losses(trainer(plain))
        check_shapes(trainer(plain))
        assert steps(resumed(plain, saved), 10, 3) == went_on
    else:
        client.close("success").result()
    return {"curve": [np.frombuffer(step, np.float32).sum().item() for step in went_on]}

"""Every method of a sampling client, and of the REST client."""

from __future__ import annotations

import datetime
import io
import json
import tarfile
import urllib.request
from typing import Any

from common import ADAM, COMPLETE, NEW, datum, fails, flat, np, same, service, tinker, trainer, types

PROMPT = types.ModelInput.from_ints([5, 9, 20, 33, 41])


def resolved(given: Any) -> Any:
    """Return a client, which newer versions give as a future."""
    return given.result() if hasattr(given, "result") else given


def params(**options: Any) -> Any:
    """Return parameters of eight tokens that no end token stops."""
    return types.SamplingParams(**{"max_tokens": 8, "temperature": 1.0, "seed": 3, "stop": [], **options})


def answers(sampler: Any, count: int = 1, given: Any = None, **options: Any) -> Any:
    """Return the result of a sampling request."""
    return sampler.sample(PROMPT, count, given or params(), **options).result()


def check_options(sampler: Any, tokenizer: Any) -> None:
    """Seeds, stops, filters and log-probs."""
    first = answers(sampler, 2)
    assert [len(sequence.tokens) for sequence in first.sequences] == [8, 8]
    assert first.sequences[0].tokens != first.sequences[1].tokens
    assert {sequence.stop_reason for sequence in first.sequences} == {"length"}
    assert [sequence.tokens for sequence in answers(sampler, 2).sequences] == [
        sequence.tokens for sequence in first.sequences
    ]
    assert answers(sampler, 1, params(seed=4)).sequences[0].tokens != first.sequences[0].tokens
    tokens = first.sequences[0].tokens
    # A token that stops is part of the answer; so is a string that stops, at the end of its text.
    stopped = answers(sampler, 1, params(stop=[tokens[2]])).sequences[0]
    assert stopped.stop_reason == "stop"
    assert stopped.tokens == tokens[: tokens.index(tokens[2]) + 1]
    text = tokenizer.decode(tokens) if tokenizer is not None else ""
    if text[1:3].isascii() and len(text) == 8:
        cut = answers(sampler, 1, params(stop=text[1:3])).sequences[0]
        assert cut.stop_reason == "stop"
        assert len(cut.tokens) == text.index(text[1:3]) + 2
    # Each filter keeps the most likely token only. The seed changes nothing.
    filters = ({"top_k": 1}, {"top_p": 1e-6, "seed": 9}, {"temperature": 0.0})
    greedy = [answers(sampler, 1, params(**options)).sequences[0] for options in filters]
    assert greedy[0].tokens == greedy[1].tokens == greedy[2].tokens
    same(answers(sampler, 1, params(top_k=1)).sequences[0].logprobs, np.zeros(8), 1e-4)


def check_logprobs(sampler: Any, model: Any) -> None:
    """Log-probs of sampling equal those of training, and the most likely tokens contain the others."""
    new_options = {"topk_sample_logprobs": 2} if NEW else {}
    result = answers(sampler, 1, None, include_prompt_logprobs=True, topk_prompt_logprobs=3, **new_options)
    tokens = PROMPT.to_ints() + list(result.sequences[0].tokens)
    inputs = {"target_tokens": np.asarray(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)}
    given = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    trained = flat(model.forward([given], "cross_entropy").result())
    assert result.prompt_logprobs[0] is None
    same(result.prompt_logprobs[1:], trained[: PROMPT.length - 1], 1e-4)
    same(result.sequences[0].logprobs, trained[PROMPT.length - 1 :], 1e-4)
    same(sampler.compute_logprobs(PROMPT).result()[1:], result.prompt_logprobs[1:], 1e-4)
    # An answer that ended with the context is scored as a whole.
    longest = answers(sampler, 1, params(max_tokens=None)).sequences[0]
    whole = types.ModelInput.from_ints(PROMPT.to_ints() + list(longest.tokens))
    same(sampler.compute_logprobs(whole).result()[PROMPT.length :], longest.logprobs, 1e-4)
    top = result.topk_prompt_logprobs
    assert top[0] is None
    assert [len(pairs) for pairs in top[1:]] == [3] * (PROMPT.length - 1)
    for token, logprob, pairs in zip(PROMPT.to_ints()[1:], result.prompt_logprobs[1:], top[1:], strict=True):
        assert [value for _, value in pairs] == sorted((value for _, value in pairs), reverse=True)
        assert logprob <= pairs[0][1] + 1e-4
        assert dict(pairs).get(token, logprob) == np.float32(logprob) or abs(dict(pairs)[token] - logprob) < 1e-4
    if NEW:
        assert len(result.sequences[0].topk_logprobs) == 8
        assert result.sequences[0].sequence_id


def check_snapshots(client: Any, model: Any) -> str:
    """A sampling client keeps the weights that it was created from."""
    base = resolved(client.create_sampling_client(base_model="tiny"))
    before = resolved(model.save_weights_and_get_sampling_client())
    path = model.save_weights_for_sampler("named").result().path
    assert path.endswith("/sampler_weights/named")
    unchanged = answers(before, 1, None, include_prompt_logprobs=True).prompt_logprobs
    for _ in range(3):
        model.forward_backward([datum(1, 9)], "cross_entropy").result()
        model.optim_step(ADAM).result()
    after = resolved(model.save_weights_and_get_sampling_client())
    named = resolved(client.create_sampling_client(model_path=path))
    samplers = (before, named, after, base)
    results = [answers(sampler, 1, None, include_prompt_logprobs=True).prompt_logprobs for sampler in samplers]
    same(results[0][1:], unchanged[1:])
    same(results[1][1:], unchanged[1:])
    assert np.abs(np.subtract(results[2][1:], unchanged[1:])).max() > 1e-3
    check_logprobs(after, model)
    assert base.get_base_model() == "tiny"
    return path


def check_errors(client: Any, sampler: Any) -> None:
    """Requests that cannot be sampled fail with the category ``user``."""
    for options, text in (
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
    ):
        error = fails(tinker.RequestFailedError, text, lambda options=options: answers(sampler, 1, params(**options)))
        assert error.category == types.RequestErrorCategory.User
    far = types.ModelInput.from_ints([5, 9999])
    error = fails(tinker.RequestFailedError, "9999", lambda: sampler.sample(far, 1, params()).result())
    assert error.category == types.RequestErrorCategory.User
    missing = "tinker://none:train:0/sampler_weights/nothing"
    fails(tinker.APIStatusError, "nothing", lambda: resolved(client.create_sampling_client(model_path=missing)))
    fails(tinker.APIStatusError, "other", lambda: resolved(client.create_sampling_client(base_model="other")))
    stranger = tinker.ServiceClient(api_key="tml-wrong-key-0000")
    fails(tinker.AuthenticationError, "key", stranger.get_server_capabilities)


def check_rest(client: Any, model: Any, path: str) -> None:
    """Listing, expiry, publication, download, deletion."""
    rest = client.create_rest_client()
    state = model.save_state("kept").result().path
    run = state.split("/")[2]
    assert run in [entry.training_run_id for entry in rest.list_training_runs(limit=50).result().training_runs]
    described = rest.get_training_run_by_tinker_path(state).result()
    assert (described.lora_rank, described.is_lora, described.base_model) == (4, True, "tiny")
    assert described.last_checkpoint.tinker_path == state
    assert rest.get_weights_info_by_tinker_path(state).result().lora_rank == 4
    assert {entry.tinker_path for entry in rest.list_checkpoints(run).result().checkpoints} == {state, path}
    assert state in [entry.tinker_path for entry in rest.list_user_checkpoints().result().checkpoints]
    session = run.split(":")[0]
    assert session in rest.list_sessions().result().sessions
    assert run in rest.get_session(session).result().training_run_ids
    rest.set_checkpoint_ttl_from_tinker_path(state, 7200).result()
    rest.publish_checkpoint_from_tinker_path(state).result()
    entry = next(entry for entry in rest.list_checkpoints(run).result().checkpoints if entry.tinker_path == state)
    assert entry.public
    left = (entry.expires_at - datetime.datetime.now(datetime.UTC)).total_seconds()
    assert 7000 < left < 7210
    rest.unpublish_checkpoint_from_tinker_path(state).result()
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    check_download(rest, model, path)
    rest.delete_checkpoint_from_tinker_path(state).result()
    assert state not in {entry.tinker_path for entry in rest.list_checkpoints(run).result().checkpoints}
    fails(tinker.APIStatusError, "kept", lambda: rest.delete_checkpoint_from_tinker_path(state).result())
    fails(tinker.NotFoundError, "run", lambda: rest.get_training_run("none:train:0").result())
    assert rest.get_audit_log().result().entries == []
    fails(RuntimeError, "no traces", lambda: rest.export_session_trace(session).result())


def check_download(rest: Any, model: Any, path: str) -> None:
    """The files of an adapter arrive, without a key."""
    if not NEW:
        link = rest.get_checkpoint_archive_url_from_tinker_path(path).result()
        with urllib.request.urlopen(link.url) as answer, tarfile.open(fileobj=io.BytesIO(answer.read())) as archive:
            assert {"adapter_config.json", "adapter_model.safetensors"} <= set(archive.getnames())
        return
    external = model.save_weights_external("exported").result().path
    assert external.endswith("/external_weights/exported")
    urls = rest.get_external_weights_urls(external).result().urls
    with urllib.request.urlopen(urls["adapter_config.json"]) as answer:
        assert json.loads(answer.read())["peft_type"] == "LORA"
    rest.delete_checkpoint_from_tinker_path(external).result()


def run_all() -> dict[str, Any]:
    """Run all checks of this file."""
    client = service()
    assert [entry.model_name for entry in client.get_server_capabilities().supported_models] == ["tiny"]
    model = trainer(client)
    sampler = resolved(client.create_sampling_client(base_model="tiny"))
    check_options(sampler, model.get_tokenizer() if COMPLETE else None)
    path = check_snapshots(client, model)
    check_errors(client, sampler)
    check_rest(client, model, path)
    return {"tokens": list(answers(sampler).sequences[0].tokens)}

"""A client that outlives its server: it stops after a line of output, and goes on after a line of input."""

from __future__ import annotations

from common import end, resumed, same, service, trainer, types
from sampling import answers, resolved
from training import steps


def main() -> None:
    client = service()
    model = trainer(client)
    steps(model, 3)
    saved = model.save_state("before").result().path
    sampler_path = model.save_weights_for_sampler("before").result().path
    sampler = resolved(client.create_sampling_client(model_path=sampler_path))
    tokens = answers(sampler).sequences[0].tokens
    went_on = steps(model, 4, 3)
    print("ready", flush=True)
    input()

    # The model goes on, with the bits of the state that the server had in memory.
    later = steps(model, 2, 7)
    # The session, its checkpoints and its sampling clients are still there.
    assert answers(sampler).sequences[0].tokens == tokens
    again = resumed(client, saved)
    assert steps(again, 6, 3) == went_on + later
    result = answers(sampler, 1, None, include_prompt_logprobs=True)
    same(
        result.prompt_logprobs[1:],
        sampler.compute_logprobs(types.ModelInput.from_ints([5, 9, 20, 33, 41])).result()[1:],
        1e-4,
    )
    end({"done": True})


main()

"""A client of a server that loses a rank: it has requests on their way at a line of output, and goes on after a line of input."""

from __future__ import annotations

from common import ADAM, datum, end, resumed, service, trainer
from sampling import answers, resolved
from training import steps

REQUESTS = 120


def main() -> None:
    client = service()
    model, other = trainer(client), trainer(client, seed=8)
    # Two models with checkpoints, of which one is public, and what the first one does after its checkpoint.
    steps(model, 3)
    saved = model.save_state("before").result().path
    steps(other, 2)
    public = other.save_state("shared").result().path
    client.create_rest_client().publish_checkpoint_from_tinker_path(public).result()
    weights = other.save_weights_for_sampler("shared").result().path
    sampler = resolved(client.create_sampling_client(model_path=weights))
    tokens = answers(sampler).sequences[0].tokens
    went_on, other_on = steps(model, 4, 3), steps(other, 2, 2)
    # A rank is killed while these are on their way.
    futures = [
        (model.forward_backward([datum(3, 9)], "cross_entropy"), model.optim_step(ADAM)) for _ in range(REQUESTS)
    ]
    futures[0][1].result()
    print("ready", flush=True)
    input()

    # All are executed, on the state that the lost ranks had. The other model goes on, too.
    for future in (future for pair in futures for future in pair):
        future.result()
    other_on += steps(other, 2, 4)
    # The same session goes on, from its checkpoint and from the public one of the other model. The sampler never noticed.
    again, shared = resumed(client, saved), resumed(service(), public)
    assert steps(again, 4, 3) == went_on
    assert steps(shared, 4, 2) == other_on
    expected = resumed(client, saved)
    steps(expected, 4, 3)
    for _ in range(REQUESTS):
        expected.forward_backward([datum(3, 9)], "cross_entropy")
        step = expected.optim_step(ADAM)
    step.result()
    assert steps(expected, 1, 7) == steps(model, 1, 7)
    assert answers(sampler).sequences[0].tokens == tokens
    assert again.save_state("after").result().path.endswith("/weights/after")
    end({"done": True})


main()

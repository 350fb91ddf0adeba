"""Stop strings: an answer ends with the first token after which its text has one."""

from __future__ import annotations

import pytest
import torch

from areal.inference.protocol import Completion, Sampling
from areal.inference.stop_strings import StopStrings
from areal.tests.unit.inference.local.rollouts import (
    PROMPT,
    assert_logprobs,
    endless,
    model,
    plain_logprobs,
    rollout,
    run,
    shortest,
    tokenizer,
)


@pytest.mark.parametrize("seed", range(4))
def test_window_finds_what_the_whole_text_has(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = tuple(torch.randint(0, 30, (4000,), generator=generator).tolist())
    for stop in (("stop",), ("</tool>",), ("é", "日"), ("🙂",), ("b\n", " Ans"), ("\n\n",)):
        strings = StopStrings(tokenizer(), stop)
        ends = [n for n in range(1, len(tokens) + 1) if strings.end(tokens[:n])]
        text = tokenizer().decode(list(tokens))
        if any(string in text for string in stop):
            assert ends[:1] == [shortest(tokens, stop)], stop
        else:
            assert not ends


def answer_until(stop: tuple[str, ...], **options: int) -> Completion:
    with rollout(tokenizer=tokenizer()) as engine:
        [answer] = run(engine.generate(PROMPT, endless(60, seed=5, stop=stop, **options)))
        return answer


def test_answer_ends_with_the_token_that_completes_the_string() -> None:
    whole = answer_until(())
    text = tokenizer().decode(list(whole.tokens))
    # Strings of several tokens, and one of the last tokens.
    for stop in ((text[11:18],), ("not there", text[30:34]), (text[-3:],), (text[0],)):
        answer = answer_until(stop)
        count = shortest(whole.tokens, stop)
        assert answer.tokens == whole.tokens[:count]
        assert answer.logprobs == pytest.approx(whole.logprobs[:count], abs=1e-5)
        assert answer.finish_reason == "stop"
    assert answer_until(("not there",)).finish_reason == "length"


def test_others_go_on_and_share_the_prompt() -> None:
    replica = model()
    with rollout(replica, tokenizer=tokenizer()) as engine:
        [whole] = run(engine.generate(PROMPT, endless(40, seed=1)))
        first = tokenizer().decode([whole.tokens[0]])
        # The one that computes the prompt stops with its first token.
        answers = run(
            engine.generate(PROMPT, endless(40, seed=1, stop=(first,))),
            *(engine.generate(PROMPT, endless(40, seed=seed)) for seed in (1, 2, 3)),
        )
    assert [len(answer.tokens) for answer in answers] == [1, 40, 40, 40]
    assert answers[1].tokens == whole.tokens
    for answer in answers[1:]:
        assert_logprobs(answer, plain_logprobs(replica, PROMPT, answer.tokens, Sampling()))


def test_stop_strings_without_a_tokenizer_raise() -> None:
    with rollout() as engine, pytest.raises(ValueError, match=r"Sampling.stop = \('x',\): text needs a tokenizer"):
        run(engine.generate(PROMPT, endless(4, stop=("x",))))


@pytest.mark.parametrize("stop", ["text", ("a", "")])
def test_bad_stop_strings_raise(stop: object) -> None:
    with pytest.raises(ValueError, match=r"Sampling.stop = .*a tuple of strings that are not empty"):
        Sampling(stop=stop)  # type: ignore[arg-type]

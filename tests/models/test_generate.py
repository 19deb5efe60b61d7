import pytest
import torch

from lightning_ups.models.generate import generate

PROMPT = torch.tensor([[1, 2], [3, 4]])
ODDS = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()


def odds(tokens):
    return ODDS.expand(*tokens.shape, 4)


def successor(tokens):
    return torch.nn.functional.one_hot((tokens + 1) % 10, 10).float()


def sampled(**options):
    options = {"num_tokens": 4000, "context": 4, **options}
    return generate(odds, PROMPT[:1], **options)[0, 2:].bincount(minlength=4) / options["num_tokens"]


def test_continues_each_prompt():
    found = generate(successor, PROMPT, num_tokens=3, context=8, temperature=0)
    assert found.tolist() == [[1, 2, 3, 4, 5], [3, 4, 5, 6, 7]]


def test_draws_by_the_models_odds():
    torch.testing.assert_close(sampled(), ODDS.exp(), atol=0.03, rtol=0)


def test_temperature_sharpens():
    torch.testing.assert_close(sampled(temperature=0.5), (2 * ODDS).softmax(0), atol=0.03, rtol=0)


def test_top_k_leaves_the_others_out():
    torch.testing.assert_close(sampled(top_k=2), torch.tensor([0, 0, 3 / 7, 4 / 7]), atol=0.03, rtol=0)
    torch.testing.assert_close(sampled(top_k=9), ODDS.exp(), atol=0.03, rtol=0)


def test_forgets_what_lies_before_the_context():
    seen = []

    def look(tokens):
        seen.append(tokens.tolist())
        return successor(tokens)

    generate(look, PROMPT[:1], num_tokens=3, context=3, temperature=0)
    assert seen == [[[1, 2]], [[1, 2, 3]], [[2, 3, 4]]]


def test_its_seed_decides_and_the_global_generator_does_not_move():
    state = torch.get_rng_state()
    first, again, other = (generate(odds, PROMPT, num_tokens=20, context=4, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_builds_no_autograd_graph():
    weight = torch.ones(4, requires_grad=True)
    found = []

    def logits(tokens):
        found.append(odds(tokens) * weight)
        return found[-1]

    generate(logits, PROMPT, num_tokens=1, context=4)
    assert not found[0].requires_grad


@pytest.mark.parametrize("prompt", [PROMPT[0], PROMPT[:, :0]])
def test_a_prompt_of_another_shape_is_refused(prompt):
    with pytest.raises(ValueError, match=r"Use prompt\.unsqueeze\(0\) for a single one\.$"):
        generate(odds, prompt, num_tokens=1, context=4)

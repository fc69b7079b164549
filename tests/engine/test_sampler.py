"""Draws: what each setting allows, how often, and that nothing but seed and number decides."""

import math
from array import array

import msgspec
import pytest
import torch

from pdnode.engine.protocol import LogitChanges, Sampling
from pdnode.engine.sampler import changed, sample, score, uniform

PROBABILITIES = (0.4, 0.3, 0.2, 0.06, 0.04)
DRAWS = 4000


def settings(
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1,
    draw: int = 0,
    banned: list[int] | None = None,
) -> Sampling:
    return Sampling(temperature, top_k, top_p, seed, draw, banned or [])


def logits(probabilities: tuple[float, ...] = PROBABILITIES) -> torch.Tensor:
    return torch.tensor([math.log(p) + 3.0 for p in probabilities])


def frequencies(**kwargs: float) -> list[float]:
    counts = [0] * len(PROBABILITIES)
    for draw in range(DRAWS):
        counts[sample(logits(), settings(draw=draw, **kwargs)).token] += 1  # type: ignore[arg-type]
    return [count / DRAWS for count in counts]


def expect(found: list[float], wanted: list[float]) -> None:
    # Four standard deviations of a proportion at 0.5.
    assert found == pytest.approx(wanted, abs=4 * 0.5 / DRAWS**0.5)


def test_plain_draws_follow_the_model() -> None:
    expect(frequencies(), list(PROBABILITIES))


def test_temperature_sharpens() -> None:
    weights = [p**2 for p in PROBABILITIES]
    expect(frequencies(temperature=0.5), [w / sum(weights) for w in weights])


@pytest.mark.parametrize("temperature", [1e-20, 1e-308, 5e-324])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_next_to_no_temperature_draws_the_likeliest(temperature: float, top_p: float) -> None:
    for values in (logits(), logits() - 90):
        found = sample(values, settings(temperature=temperature, top_p=top_p, banned=[0]))
        assert found.token == 1


def test_top_k_renormalizes_the_best() -> None:
    found = frequencies(top_k=2)
    expect(found, [4 / 7, 3 / 7, 0, 0, 0])
    assert found[2:] == [0, 0, 0]


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, 1), (0.4, 1), (0.41, 2), (0.7, 2), (0.71, 3), (0.95, 4), (0.999, 5)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: int) -> None:
    found = frequencies(top_p=top_p - 1e-6)
    total = sum(PROBABILITIES[:kept])
    expect(found, [p / total if n < kept else 0 for n, p in enumerate(PROBABILITIES)])
    assert found[kept:] == [0] * (5 - kept)


def test_top_p_counts_within_top_k() -> None:
    """0.4 / 0.9 and 0.3 / 0.9 reach 0.7 together: the third of top-k stays out."""
    expect(frequencies(top_k=3, top_p=0.7), [4 / 7, 3 / 7, 0, 0, 0])


def test_banned_tokens_are_never_drawn_and_logprobs_stay_the_models() -> None:
    for draw in range(200):
        assert sample(logits(), settings(draw=draw, banned=[0, 2])).token in (1, 3, 4)
    greedy = sample(logits(), settings(temperature=0, banned=[0]))
    assert greedy.token == 1
    assert greedy.logprob == pytest.approx(math.log(0.3), abs=1e-5)


def test_greedy_takes_the_lowest_id_among_equals_and_leaves_the_logits_alone() -> None:
    values = torch.tensor([0.0, 2.0, 2.0])
    assert sample(values, settings(temperature=0, banned=[0])).token == 1
    assert values.tolist() == [0.0, 2.0, 2.0]


def test_logprob_is_of_raw_logits_whatever_the_temperature() -> None:
    drawn = sample(logits(), settings(temperature=0.01))
    assert drawn.token == 0
    assert drawn.logprob == pytest.approx(math.log(0.4), abs=1e-5)


def test_draws_repeat_with_the_seed_and_differ_by_number() -> None:
    def series(seed: int) -> list[int]:
        return [sample(logits(), settings(seed=seed, draw=n)).token for n in range(64)]

    assert series(5) == series(5)
    assert series(5) != series(6)
    assert len(set(series(5))) > 1


def test_the_uniform_numbers_are_pinned() -> None:
    """A change here changes every seeded answer: it needs a word in the change log."""
    assert uniform(seed=0, draw=0) == 0.0564663990004608
    assert uniform(seed=-1, draw=7) == uniform(seed=2**64 - 1, draw=7)
    numbers = [uniform(seed=3, draw=n) for n in range(2000)]
    assert all(0 <= number < 1 for number in numbers)
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=4 / math.sqrt(12 * 2000))


def test_logits_that_are_no_numbers_are_an_error() -> None:
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(torch.tensor([0.0, math.nan]), settings(temperature=0))


def test_extreme_temperatures_stay_numbers() -> None:
    assert sample(logits(), settings(temperature=1e-9)).token == 0
    assert 0 <= sample(logits(), settings(temperature=1e9, draw=3)).token < 5


def changes(
    *, repeated: list[int] | None = None, repetition: float = 1.0, bias: dict[int, float]
) -> LogitChanges:
    return LogitChanges(
        array("I", repeated or []).tobytes(),
        repetition,
        array("I", bias).tobytes(),
        array("f", bias.values()).tobytes(),
    )


def test_changes_penalize_then_add_and_leave_the_logits_alone() -> None:
    values = torch.tensor([2.0, -2.0, 0.0, 1.0, 3.0])
    found = changed(values, changes(repeated=[0, 1, 2], repetition=4.0, bias={1: 0.5, 4: -10.0}))
    assert found.tolist() == [0.5, -7.5, 0.0, 1.0, -7.0]
    assert changed(values, changes(bias={})).tolist() == values.tolist()
    assert values.tolist() == [2.0, -2.0, 0.0, 1.0, 3.0]


def test_a_tiny_penalty_leaves_logits_that_can_be_drawn_from() -> None:
    made = changes(repeated=[1, 3, 4], repetition=1e-300, bias={})
    sampling = msgspec.structs.replace(settings(), changes=made)
    values = torch.tensor([2.0, 5.0, 0.0, -1.0, 3.0])
    assert torch.isfinite(changed(values, made)).all()
    found = {
        sample(values, msgspec.structs.replace(sampling, draw=draw)).token for draw in range(40)
    }
    assert found == {1, 4}, "as likely as each other, and all else is out of reach"


def test_changes_decide_the_draw_but_not_its_logprob() -> None:
    sampling = msgspec.structs.replace(settings(temperature=0), changes=changes(bias={3: 5.0}))
    drawn = sample(logits(), sampling)
    assert drawn.token == 3
    assert drawn.logprob == pytest.approx(math.log(0.06), abs=1e-5)
    banned = msgspec.structs.replace(sampling, banned=[3])
    assert sample(logits(), banned).token == 0


def test_the_likeliest_tokens_come_with_the_draw() -> None:
    sampling = msgspec.structs.replace(
        settings(temperature=0), logprobs=3, changes=changes(bias={4: 50.0})
    )
    drawn = sample(logits((0.3, 0.4, 0.2, 0.06, 0.04)), sampling)
    assert drawn.token == 4
    assert [token for token, _ in drawn.top] == [1, 0, 2]
    wanted = [math.log(p) for p in (0.4, 0.3, 0.2)]
    assert [logprob for _, logprob in drawn.top] == pytest.approx(wanted, abs=1e-5)
    assert sample(logits(), settings()).top == []
    assert len(sample(logits(), msgspec.structs.replace(sampling, logprobs=20)).top) == 5


def test_scores_of_known_tokens_over_the_edge_of_a_slice() -> None:
    """150 rows are three slices; each row's logits are its own."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(151, 8, generator=generator)
    targets = torch.randint(0, 8, (150,), generator=generator).tolist()
    sizes: list[int] = []

    def head(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return rows * 2

    logprobs, tops = score(hidden, targets, 2, head)
    exact = torch.log_softmax(hidden[:150].double() * 2, dim=1)
    wanted = exact.gather(1, torch.tensor(targets).unsqueeze(1)).squeeze(1).tolist()
    assert logprobs == pytest.approx(wanted, abs=1e-5)
    assert sizes == [64, 64, 22]
    best = exact.argsort(dim=1, descending=True)[:, :2].tolist()
    assert [[token for token, _ in top] for top in tops] == best
    assert [top[0][1] for top in tops] == pytest.approx(exact.max(dim=1).values.tolist(), abs=1e-5)

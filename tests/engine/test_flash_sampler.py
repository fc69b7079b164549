"""Drawing all rows at once: what `sample` says of each setting holds, whatever the batch."""

import math

import pytest
import torch

from pdnode.engine.flash_sampler import FlashSampler
from pdnode.engine.protocol import LogitChanges, Sampling
from pdnode.engine.sampler import sample
from tests.support.flash_stand_in import StandIn

PROBABILITIES = (0.06, 0.3, 0.4, 0.2, 0.04)
DRAWS = 4000
LOGITS = torch.tensor([math.log(p) + 3.0 for p in PROBABILITIES])


def settings(**changes: object) -> Sampling:
    values: dict[str, object] = {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 1, "draw": 0, "banned": [],
    }  # fmt: skip
    return Sampling(**values | changes)  # type: ignore[arg-type]


def draw(samplings: list[Sampling]) -> list[int]:
    sampler = FlashSampler(StandIn())
    found = sampler(LOGITS.expand(len(samplings), -1), samplings)
    return [one.token for one in found]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, PROBABILITIES),
        ({"top_k": 2}, (0, 3 / 7, 4 / 7, 0, 0)),
        ({"top_p": 0.65}, (0, 3 / 7, 4 / 7, 0, 0)),
        ({"top_p": 0.75}, (0, 3 / 9, 4 / 9, 2 / 9, 0)),
        ({"top_k": 4, "top_p": 0.7}, (0, 3 / 7, 4 / 7, 0, 0)),  # of what top-k leaves
        ({"banned": [2]}, (0.1, 0.5, 0, 1 / 3, 0.2 / 3)),
    ],
)
def test_frequencies(changes: dict[str, object], wanted: tuple[float, ...]) -> None:
    tokens = draw([settings(draw=number, **changes) for number in range(DRAWS)])
    for token, probability in enumerate(wanted):
        share = tokens.count(token) / DRAWS
        assert share == pytest.approx(probability, abs=0.03)
        assert share == 0 or probability > 0


@pytest.mark.parametrize("temperature", [1e-20, 1e-38, 1e-50, 5e-324])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_next_to_no_temperature_draws_the_likeliest(temperature: float, top_p: float) -> None:
    one = settings(temperature=temperature, top_p=top_p)
    other = settings(temperature=temperature, top_p=top_p, banned=[2])
    assert draw([one, other]) == [2, 1]


def test_a_draw_depends_on_seed_and_number_alone() -> None:
    """Not on its row, nor on the others' settings: FlashInfer's own draws would."""
    mine = [settings(seed=seed, draw=7, top_k=4) for seed in range(40)]
    others = [settings(seed=900 + n, top_p=0.5, temperature=n % 2 * 0.7) for n in range(40)]
    alone = [draw([one])[0] for one in mine]
    mixed = draw([one for pair in zip(others, mine, strict=True) for one in pair])
    assert mixed[1::2] == alone
    assert len(set(alone)) > 1


def test_greedy_scores_and_changes_are_those_of_sample() -> None:
    changes = LogitChanges(
        repeated=b"\2\0\0\0", repetition=2.0, biased=b"\4\0\0\0", bias=b"\0\0\x80\x3f"
    )
    samplings = [
        settings(temperature=0.0, logprobs=3),
        settings(temperature=0.0, banned=[2], logprobs=1),
        settings(temperature=0.0, changes=changes, logprobs=0),
        settings(temperature=0.0, changes=changes, banned=[1, 3], logprobs=5),
    ]
    logits = torch.stack([LOGITS.roll(shift) for shift in range(4)])
    found = FlashSampler(StandIn())(logits, samplings)
    for row, one, sampling in zip(logits, found, samplings, strict=True):
        wanted = sample(row, sampling)
        assert one.token == wanted.token
        assert one.logprob == pytest.approx(wanted.logprob)
        assert [token for token, _ in one.top] == [token for token, _ in wanted.top]
        assert [p for _, p in one.top] == pytest.approx([p for _, p in wanted.top])
    assert torch.equal(logits[0], LOGITS)


def test_numbers_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(FloatingPointError):
        FlashSampler(StandIn())(torch.tensor([[0.0, math.nan]]), [settings()])

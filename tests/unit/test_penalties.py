"""What bias and penalties add up to, draw by draw."""

from array import array

import pytest

from pdnode.core.request import Request
from pdnode.daemon.penalties import Changes, changes_logits
from pdnode.engine.protocol import LogitChanges


def request(**fields: object) -> Request:
    plain: dict[str, object] = {
        "request_id": "r", "prompt": (5, 7, 5), "max_tokens": 8, "min_tokens": 0,
        "stop_tokens": frozenset(), "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0,
    }  # fmt: skip
    return Request(**(plain | fields))  # type: ignore[arg-type]


def bias(packed: LogitChanges) -> dict[int, float]:
    ids, numbers = array("I", packed.biased), array("f", packed.bias)
    assert len(ids) == len(set(ids)) == len(numbers)
    return dict(zip(ids, numbers, strict=True))


def repeated(packed: LogitChanges) -> list[int]:
    return array("I", packed.repeated).tolist()


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({}, False),
        ({"logit_bias": ((3, 1.0),)}, True),
        ({"presence_penalty": -0.5}, True),
        ({"frequency_penalty": 0.5}, True),
        ({"repetition_penalty": 1.1}, True),
    ],
)
def test_what_changes_logits(fields: dict[str, object], changes: bool) -> None:
    assert changes_logits(request(**fields)) == changes


def test_presence_counts_once_and_frequency_each_time() -> None:
    changes = Changes(request(presence_penalty=0.5, frequency_penalty=0.25))
    assert bias(changes.packed()) == {}  # the prompt does not count
    for token in (9, 5, 9):
        changes.drew(token)
    assert bias(changes.packed()) == {9: -1.0, 5: -0.75}
    assert repeated(changes.packed()) == []


def test_penalties_add_to_the_bias_of_the_same_token() -> None:
    changes = Changes(request(logit_bias=((9, 4.0), (3, -100.0)), presence_penalty=1.0))
    changes.drew(9)
    changes.drew(9)
    assert bias(changes.packed()) == {9: 3.0, 3: -100.0}


def test_repetition_takes_prompt_and_answer_once_each() -> None:
    changes = Changes(request(repetition_penalty=1.5))
    assert repeated(changes.packed()) == [5, 7]
    for token in (9, 7, 9):
        changes.drew(token)
    packed = changes.packed()
    assert repeated(packed) == [5, 7, 9]
    assert packed.repetition == 1.5
    assert bias(packed) == {}

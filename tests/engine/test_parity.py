"""Our greedy float32 tokens against those of transformers, however the work is cut up."""

import hashlib

import pytest
import torch

from pdnode.engine.protocol import SequenceStep
from pdnode.models.decoder import Decoder
from tests.support.local_engine import GREEDY, LocalEngine, load_model
from tests.support.model import smollm2_dir
from tests.support.reference import Case, load_reference

RAGGED = (1, 2, 15, 16, 17, 65, 197, 513)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return load_model(smollm2_dir())


def test_the_model_is_the_one_the_reference_was_made_with() -> None:
    with open(smollm2_dir() / "model.safetensors", "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == load_reference().model_sha256


@pytest.mark.parametrize("chunk", [None, 512, 64, 7 * 16])
def test_ragged_batch_in_chunks(model: Decoder, chunk: int | None) -> None:
    cases = [load_reference().grid[size] for size in RAGGED]
    engine = LocalEngine(model, pages=128)
    count = 32 if chunk == 64 else 16
    found = engine.generate([case.prompt for case in cases], count, chunk)
    assert found == [case.tokens[:count] for case in cases]


@pytest.mark.parametrize("size", [2, 16, 17, 63, 64, 197, 1500])
def test_decode_on_imported_pages(model: Decoder, size: int) -> None:
    """Prefill in one region without the last token, its pages copied into another one."""
    case = load_reference().grid[size]
    source = LocalEngine(model, pages=100, seed=1)
    target = LocalEngine(model, pages=110, seed=2)
    count = 8
    sent = source.take(size - 1)
    given = target.take(size + count)
    source.step([SequenceStep(1, 0, case.prompt[:-1], sent, None)])
    _copy_pages(source, sent, target, given)
    tokens = [case.prompt[-1]]
    for number in range(count):
        start = size - 1 + number
        part = SequenceStep(9, start, tokens[-1:], given if number == 0 else [], GREEDY)
        (drawn,) = target.step([part])
        tokens.append(drawn.token)
    assert tokens[1:] == case.tokens[:count]
    assert source.raised == 30
    assert target.raised == 30 * count


def test_long_text_beside_a_running_stream(model: Decoder) -> None:
    """A stream decodes while 1,541 tokens arrive in chunks of 512: neither disturbs the other."""
    long, short = load_reference().grid[1541], load_reference().grid[17]
    engine = LocalEngine(model, pages=140)
    found = engine.generate([long.prompt, short.prompt], 8, 512)
    assert found == [long.tokens[:8], short.tokens[:8]]


def test_the_set_agrees_in_its_first_tokens(model: Decoder) -> None:
    cases: list[Case] = load_reference().prompts[:8]
    engine = LocalEngine(model, pages=256)
    found = engine.generate([case.prompt for case in cases], 16, 128)
    assert found == [case.tokens[:16] for case in cases]


def _copy_pages(
    source: LocalEngine, sent: list[int], target: LocalEngine, given: list[int]
) -> None:
    for layer in range(source.geometry.layers):
        for from_page, to_page in zip(sent, given, strict=False):
            _page(target, layer, to_page).copy_(_page(source, layer, from_page))


def _page(engine: LocalEngine, layer: int, page: int) -> torch.Tensor:
    offset = layer * engine.geometry.layer_stride + page * engine.geometry.page_bytes
    return engine.memory[offset : offset + engine.geometry.page_bytes]

"""Tensor views of a region address the bytes that the geometry names."""

import pytest
import torch

from pdnode.core.geometry import KvGeometry
from pdnode.memory.layout import region_views
from pdnode.memory.region import MemfdRegion

FORM = KvGeometry("gqa", 3, 4, 8, 16, "bfloat16", 2, 5)


def test_views_share_memory_with_every_mapping() -> None:
    region = MemfdRegion.create("test", FORM.region_bytes)
    views = region_views(region.map(), FORM)
    assert len(views) == 3
    assert views[2].keys.shape == views[2].values.shape == (5, 2, 16, 8)
    assert views[2].keys.stride() == views[2].values.stride()
    assert views[2].rows.shape == (5 * 2 * 2, 16 * 8)
    assert views[2].rows.is_contiguous()
    views[2].values[3, 1, 15] = 1.5
    page = 2 * FORM.layer_stride + 3 * FORM.page_bytes
    start = page + FORM.head_bytes + FORM.head_bytes // 2 + 15 * 8 * 2
    stored = bytes(region.map())
    assert stored[start : start + 16] == bytes.fromhex("c03f") * 8
    assert sum(map(bool, stored)) == 16
    assert views[2].rows[(3 * 2 + 1) * 2 + 1, -8:].tolist() == [1.5] * 8


def test_a_buffer_of_another_size_is_a_programmers_error() -> None:
    with pytest.raises(AssertionError):
        region_views(torch.zeros(FORM.region_bytes - 2, dtype=torch.uint8), FORM)


def test_latents_are_one_head_and_one_part() -> None:
    """[L, P, 1, 1, T, latent + rope]: what is written as a key is the value too."""
    form = KvGeometry("mla", 2, 1, 8, 16, "float32", 3, 5)
    memory = torch.zeros(form.region_bytes, dtype=torch.uint8)
    views = region_views(memory, form)
    assert views[1].keys.shape == views[1].values.shape == (5, 1, 16, 8)
    assert views[1].rows.shape == (5, 16 * 8)
    views[1].keys[3, 0, 15] = 1.5
    assert views[1].values[3, 0, 15].tolist() == [1.5] * 8
    assert views[1].rows[3, -8:].tolist() == [1.5] * 8
    start = form.layer_stride + 3 * form.page_bytes + 15 * 8 * 4
    assert memory[start : start + 32].view(torch.float32).tolist() == [1.5] * 8
    assert memory.count_nonzero() == memory[start : start + 32].count_nonzero()

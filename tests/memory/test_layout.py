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


def test_other_kinds_are_not_viewed() -> None:
    latent = KvGeometry("mla", 1, 1, 8, 16, "float32", 1, 2)
    with pytest.raises(AssertionError, match="no views for mla"):
        region_views(torch.zeros(latent.region_bytes, dtype=torch.uint8), latent)

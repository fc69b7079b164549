"""KvGeometry: sizes and who holds which head."""

import pytest

from pdnode.core.geometry import KvGeometry


def geometry(
    kind: str = "gqa",
    *,
    kv_heads: int = 8,
    tp: int = 1,
    page_tokens: int = 16,
    dtype: str = "bfloat16",
    head_dim: int = 128,
) -> KvGeometry:
    return KvGeometry(
        kind=kind,
        layers=3,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_tokens=page_tokens,
        dtype=dtype,
        tp=tp,
        pages=10,
    )


def test_bytes_of_a_page_and_a_region() -> None:
    whole = geometry(tp=2)
    assert whole.head_bytes == 2 * 16 * 128 * 2
    assert whole.page_bytes == 4 * 8192
    assert whole.layer_stride == 10 * 32768
    assert whole.region_bytes == 3 * 327680
    assert geometry(dtype="float32").head_bytes == 2 * whole.head_bytes


def test_mla_keeps_one_latent_on_every_rank() -> None:
    latent = geometry("mla", kv_heads=1, tp=4, head_dim=576)
    assert latent.heads_per_rank == 1
    assert [latent.rank_heads(rank) for rank in range(4)] == [range(1)] * 4
    assert latent.page_bytes == 16 * 576 * 2


@pytest.mark.parametrize(
    ("kv_heads", "tp", "heads"),
    [
        (8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (3, 3, [[0], [1], [2]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 3, [[0], [0], [0]]),
    ],
)
def test_heads_of_the_ranks(kv_heads: int, tp: int, heads: list[list[int]]) -> None:
    split = geometry(kv_heads=kv_heads, tp=tp)
    assert [list(split.rank_heads(rank)) for rank in range(tp)] == heads
    assert split.heads_per_rank == len(heads[0])
    with pytest.raises(AssertionError):
        split.rank_heads(tp)


def test_pages_for_tokens() -> None:
    assert [geometry().pages_for(n) for n in (0, 1, 15, 16, 17, 32)] == [0, 1, 1, 1, 2, 2]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(AssertionError, match="6 KV heads over 4 ranks"):
        geometry(kv_heads=6, tp=4)
    for bad in ("mha", "MLA"):
        with pytest.raises(AssertionError):
            geometry(bad)
    with pytest.raises(AssertionError):
        geometry("mla", kv_heads=2)
    with pytest.raises(AssertionError, match="int8"):
        geometry(dtype="int8")

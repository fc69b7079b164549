"""The KV geometry: the one description that allocator, attention kernel, plan and transfer share.

Letters: L layers, H KV heads of the model, Hr KV heads of a rank, D head dimension, T tokens a
page, P pages. A rank's region is `[L, P, Hr, 2 (K,V), T, D]`: in a layer pages are contiguous, and
heads come before K/V and tokens, so that any range of heads of a page is one contiguous piece.
MLA keeps one latent vector a token on every rank: `[L, P, 1, 1, T, latent + rope]`.
"""

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Geometry of the KV memory of one TP group; equal on both sides but for `tp` and `pages`.

    A node has one group, or several alike (data parallelism), each with a page pool of its own.
    """

    kind: str  # "gqa" | "mla"
    layers: int
    kv_heads: int  # of the whole model; 1 for MLA
    head_dim: int  # MLA: latent + rope
    page_tokens: int
    dtype: str
    tp: int
    pages: int

    def __post_init__(self) -> None:
        assert self.kind in ("gqa", "mla"), self.kind
        assert self.dtype in DTYPE_BYTES, self.dtype
        assert min(self.layers, self.kv_heads, self.head_dim, self.page_tokens, self.tp) > 0
        assert self.pages >= 0
        if self.kind == "mla":
            assert self.kv_heads == 1
        else:
            assert self.kv_heads % self.tp == 0 or self.tp % self.kv_heads == 0, (
                f"{self.kv_heads} KV heads over {self.tp} ranks"
            )

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.kv_heads // self.tp) if self.kind == "gqa" else 1

    def rank_heads(self, rank: int) -> range:
        """KV heads that `rank` holds; where ranks outnumber heads, neighbours hold copies."""
        assert 0 <= rank < self.tp
        if self.kind == "mla":
            return range(1)
        if self.tp <= self.kv_heads:
            return range(rank * self.heads_per_rank, (rank + 1) * self.heads_per_rank)
        head = rank * self.kv_heads // self.tp
        return range(head, head + 1)

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head in one page of one layer, K and V together."""
        parts = 2 if self.kind == "gqa" else 1
        return parts * self.page_tokens * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer on one rank."""
        return self.heads_per_rank * self.head_bytes

    @property
    def layer_stride(self) -> int:
        """Bytes from a page of layer l to the same page of layer l + 1, in a rank's region."""
        return self.pages * self.page_bytes

    @property
    def region_bytes(self) -> int:
        return self.layers * self.layer_stride

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        assert tokens >= 0
        return -(-tokens // self.page_tokens)

"""A stand-in for the module `flashinfer`: the calls that the engine makes, by plain torch.

Each call is bound with the signature table of the real package and does what its documentation
says from the arguments alone: page tables as indptr, indices and lengths of last pages, caches as a
tuple of strided views. What the real kernels refuse is refused: other integers than int32, K and V
with different strides, a recorded batch of another size. So the planning of our back end is checked
for real, and only the arithmetic is not FlashInfer's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.support.signatures import bound, versions

(VERSION,) = versions("flashinfer-python")


def taken(name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> SimpleNamespace:
    return SimpleNamespace(**bound("flashinfer-python", VERSION, name, args, kwargs))


def _int32(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.int32, tensor.dtype
        assert tensor.is_contiguous()
        assert tensor.ndim == 1


def _same_strides(cache: tuple[Tensor, Tensor]) -> None:
    keys, values = cache
    assert keys.stride() == values.stride(), "K and V have one set of strides"
    assert keys.stride(-1) == 1


def _pages_of(sequence: int, indptr: Tensor, indices: Tensor) -> Tensor:
    return indices[int(indptr[sequence]) : int(indptr[sequence + 1])].long()


def _append(rows: list[tuple[Tensor, Tensor]], at: SimpleNamespace, *, page_tokens: int) -> None:
    """Put row n of each (rows, cache with tokens in its dimension -2) where `at` says."""
    _int32(at.batch_indices, at.positions, at.kv_indices, at.kv_indptr, at.kv_last_page_len)
    assert len(at.kv_indptr) == len(at.kv_last_page_len) + 1
    for row, (sequence, position) in enumerate(
        zip(at.batch_indices.tolist(), at.positions.tolist(), strict=True)
    ):
        pages = _pages_of(sequence, at.kv_indptr, at.kv_indices)
        end = (len(pages) - 1) * page_tokens + int(at.kv_last_page_len[sequence])
        assert position < end, "the tables include what is appended"
        for source, cache in rows:
            cache[int(pages[position // page_tokens])][..., position % page_tokens, :] = source[row]


def append_paged_kv_cache(*args: object, **kwargs: object) -> None:
    at = taken("append_paged_kv_cache", args, kwargs)
    assert at.kv_layout == "HND"
    _same_strides(at.paged_kv_cache)
    keys, values = at.paged_kv_cache
    rows = [(at.append_key, keys), (at.append_value, values)]
    for source, cache in rows:
        assert source.shape[1:] == (cache.shape[1], cache.shape[3])
        assert source.dtype == cache.dtype
        assert source.stride(-1) == 1
    _append(rows, at, page_tokens=keys.shape[2])


def append_paged_mla_kv_cache(*args: object, **kwargs: object) -> None:
    at = taken("append_paged_mla_kv_cache", args, kwargs)
    rows = [(at.append_ckv, at.ckv_cache), (at.append_kpe, at.kpe_cache)]
    assert all(cache.ndim == 3 and cache.stride(-1) == 1 for _, cache in rows)
    _append(rows, at, page_tokens=at.ckv_cache.shape[1])


def _attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """[n, H, D] over [s, Hr, D]: the last n of s positions, causal."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,shd->hns", queries, keys) * scale
    seen = torch.ones(len(queries), len(keys), dtype=torch.bool).tril(len(keys) - len(queries))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hns,shd->nhd", weights, values)


@dataclass
class _Planned:
    """The tables of a wrapper. Recorded ones stay in the buffers that they were given."""

    query_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last: Tensor | None = None
    lengths: Tensor | None = None
    page_tokens: int = 0
    scale: float = 0.0
    dtypes: tuple[torch.dtype, torch.dtype] | None = None
    shape: tuple[int, ...] = ()

    def length(self, sequence: int, pages: int) -> int:
        if self.lengths is not None:
            return int(self.lengths[sequence])
        assert self.last is not None
        assert 1 <= int(self.last[sequence]) <= self.page_tokens
        return (pages - 1) * self.page_tokens + int(self.last[sequence])


def _kept(given: Tensor, buffer: Tensor | None, *, larger: bool = False) -> Tensor:
    """A copy on the device: in `buffer`, where there is one."""
    _int32(given)
    if buffer is None:
        return given.clone()
    assert len(buffer) == len(given) or (larger and len(buffer) >= len(given))
    buffer[: len(given)].copy_(given)
    return buffer


@dataclass
class StandIn:
    """Stands for the module. `planned` counts the plans of each kind of wrapper."""

    planned: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.append_paged_kv_cache = append_paged_kv_cache
        self.append_paged_mla_kv_cache = append_paged_mla_kv_cache
        self.top_k_renorm_probs = top_k_renorm_probs
        self.top_p_renorm_probs = top_p_renorm_probs
        self.BatchDecodeWithPagedKVCacheWrapper = self._maker(_Decode)
        self.BatchPrefillWithPagedKVCacheWrapper = self._maker(_Prefill)
        csr = SimpleNamespace(csr=lambda *a, **k: taken("MLAPlanMetadata.csr", a, k))
        self.mla = SimpleNamespace(
            BatchMLAPagedAttentionWrapper=self._maker(_Latent), MLAPlanMetadata=csr
        )

    def _maker(self, kind: type["_Wrapper"]) -> Callable[..., "_Wrapper"]:
        def make(*args: object, **kwargs: object) -> _Wrapper:
            made = taken(f"{kind.NAME}.__init__", args, kwargs)
            assert made.backend == "fa2", "the others do not take our strides"
            assert made.float_workspace_buffer.dtype == torch.uint8
            return kind(self, made)

        return make


class _Wrapper:
    NAME: str

    def __init__(self, module: StandIn, made: SimpleNamespace) -> None:
        self._module = module
        self._made = made
        self._plan: _Planned | None = None
        if self.NAME != "BatchMLAPagedAttentionWrapper":
            assert made.kv_layout == "HND"

    def plan(self, *args: object, **kwargs: object) -> None:
        plan = taken(f"{self.NAME}.plan", args, kwargs)
        self._module.planned[self.NAME] = self._module.planned.get(self.NAME, 0) + 1
        self._plan = self._planned(plan)
        self._plan.scale = plan.sm_scale
        self._plan.dtypes = (plan.q_data_type, plan.kv_data_type)
        self._plan.page_tokens = plan.page_size

    def _planned(self, plan: SimpleNamespace) -> _Planned:
        raise NotImplementedError

    def _buffer(self, name: str) -> Tensor | None:
        return getattr(self._made, name, None) if self._recorded else None

    @property
    def _recorded(self) -> bool:
        return bool(getattr(self._made, "use_cuda_graph", False))

    def _over_sequences(
        self, queries: Tensor, gather: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> Tensor:
        """`gather(pages)`: K and V of some pages, [tokens, Hr, D]."""
        plan = self._plan
        assert plan is not None, "planned first"
        assert int(plan.query_indptr[-1]) == len(queries)
        assert plan.dtypes is not None
        assert queries.dtype == plan.dtypes[0]
        found = []
        for sequence in range(len(plan.query_indptr) - 1):
            pages = _pages_of(sequence, plan.indptr, plan.indices)
            length = plan.length(sequence, len(pages))
            assert len(pages) == -(-length // plan.page_tokens)
            keys, values = gather(pages)
            first, end = plan.query_indptr[sequence : sequence + 2].tolist()
            rows = queries[first:end]
            found.append(_attend(rows, keys[:length], values[:length], plan.scale))
        return torch.cat(found)

    def run(self, *args: object, **kwargs: object) -> Tensor:
        run = taken(f"{self.NAME}.run", args, kwargs)
        keys, values = run.paged_kv_cache
        _same_strides(run.paged_kv_cache)
        assert self._plan is not None
        heads, kv_heads, dim = self._plan.shape
        assert run.q.shape[1:] == (heads, dim)
        assert keys.shape[1:] == (kv_heads, self._plan.page_tokens, dim)

        def gather(pages: Tensor) -> tuple[Tensor, Tensor]:
            both = [part[pages].transpose(1, 2).flatten(0, 1) for part in (keys, values)]
            return both[0], both[1]

        return self._over_sequences(run.q, gather)


class _Decode(_Wrapper):
    NAME = "BatchDecodeWithPagedKVCacheWrapper"

    def _planned(self, plan: SimpleNamespace) -> _Planned:
        group = plan.num_qo_heads // plan.num_kv_heads
        assert self._made.use_tensor_cores or group in (1, 2, 3, 4, 6, 8, 16)
        return _Planned(
            query_indptr=torch.arange(len(plan.indptr)),
            indptr=_kept(plan.indptr, self._buffer("paged_kv_indptr_buffer")),
            indices=_kept(plan.indices, self._buffer("paged_kv_indices_buffer"), larger=True),
            last=_kept(plan.last_page_len, self._buffer("paged_kv_last_page_len_buffer")),
            shape=(plan.num_qo_heads, plan.num_kv_heads, plan.head_dim),
        )


class _Prefill(_Wrapper):
    NAME = "BatchPrefillWithPagedKVCacheWrapper"

    def _planned(self, plan: SimpleNamespace) -> _Planned:
        assert plan.causal
        return _Planned(
            query_indptr=_kept(plan.qo_indptr, None),
            indptr=_kept(plan.paged_kv_indptr, None),
            indices=_kept(plan.paged_kv_indices, None),
            last=_kept(plan.paged_kv_last_page_len, None),
            shape=(plan.num_qo_heads, plan.num_kv_heads, plan.head_dim_qk),
        )


class _Latent(_Wrapper):
    NAME = "BatchMLAPagedAttentionWrapper"

    def _planned(self, plan: SimpleNamespace) -> _Planned:
        assert plan.causal
        tables = plan.metadata
        return _Planned(
            query_indptr=_kept(tables.qo_indptr, self._buffer("qo_indptr")),
            indptr=_kept(tables.kv_indptr, self._buffer("kv_indptr")),
            indices=_kept(tables.kv_indices, self._buffer("kv_indices"), larger=True),
            lengths=_kept(tables.kv_len_arr, self._buffer("kv_len_arr")),
            shape=(plan.num_heads, plan.head_dim_ckv, plan.head_dim_kpe),
        )

    def run(self, *args: object, **kwargs: object) -> Tensor:
        run = taken(f"{self.NAME}.run", args, kwargs)
        assert self._plan is not None
        heads, latent, turned = self._plan.shape
        assert run.query.shape[1:] == (heads, latent + turned)
        assert run.kv_cache.shape[1:] == (self._plan.page_tokens, latent + turned)

        def gather(pages: Tensor) -> tuple[Tensor, Tensor]:
            both = run.kv_cache[pages].flatten(0, 1).unsqueeze(1)
            return both, both[..., :latent]

        return self._over_sequences(run.query, gather)


def top_k_renorm_probs(*args: object, **kwargs: object) -> Tensor:
    of = taken("top_k_renorm_probs", args, kwargs)
    assert of.top_k.dtype == torch.int32
    kept = torch.zeros_like(of.probs)
    for row, count in enumerate(of.top_k.tolist()):
        least = of.probs[row].topk(count).values[-1]
        kept[row] = of.probs[row].where(of.probs[row] >= least, torch.zeros(()))
    return kept / kept.sum(1, keepdim=True)


def top_p_renorm_probs(*args: object, **kwargs: object) -> Tensor:
    of = taken("top_p_renorm_probs", args, kwargs)
    assert of.top_p.dtype == torch.float32
    kept = torch.zeros_like(of.probs)
    for row, share in enumerate(of.top_p.tolist()):
        falling = of.probs[row].sort(descending=True).values
        reached = int((falling.cumsum(0) < share).sum())
        kept[row] = of.probs[row].where(of.probs[row] >= falling[reached], torch.zeros(()))
    return kept / kept.sum(1, keepdim=True)

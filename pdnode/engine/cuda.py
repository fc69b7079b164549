"""The CUDA backend: FlashInfer, the counter kernel and graphs, on the GPU of one rank."""

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pdnode.core.geometry import KvGeometry
from pdnode.engine.attention import AttentionBackend
from pdnode.engine.counter_kernel import KernelCounter, architecture_of, compile_kernel
from pdnode.engine.flash import WORKSPACE_BYTES, FlashAttention, FlashShape
from pdnode.engine.flash_limits import flash_problems
from pdnode.engine.flash_sampler import FlashSampler
from pdnode.engine.flash_tables import FixedTables
from pdnode.engine.graphs import CudaRecorder, DecodeGraphs, graph_sizes
from pdnode.engine.protocol import Init
from pdnode.engine.sampler import Sampler
from pdnode.errors import Problem
from pdnode.memory import cudriver
from pdnode.memory.cumem import CumemRegion
from pdnode.memory.kinds import KvRegion
from pdnode.memory.layout import LayerViews
from pdnode.memory.region import MemfdRegion, available_bytes
from pdnode.memory.staged import StagedRegion
from pdnode.models.config import ModelConfig
from pdnode.models.decoder import Decoder

# Of the GPU's free memory, once weights and work space are there: leaves room for activations.
_AUTO_POOL_RATIO = 0.85
_MIRROR_RATIO = 0.5  # of the host's free memory, for the mirrors of staged regions
_KERNEL_CACHES = {
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "torch",
}


def keep_kernels(cache_dir: str) -> None:
    """Keep what is compiled at run time under `cache_dir`. Before the first use of CUDA; what the
    environment names already stays."""
    for name, folder in _KERNEL_CACHES.items():
        if name not in os.environ:
            path = Path(cache_dir) / folder
            path.mkdir(parents=True, exist_ok=True)
            os.environ[name] = str(path)


class CudaBackend:
    """engine.backend.Backend on one GPU, whose context becomes current."""

    waits = False

    def __init__(self, init: Init, config: ModelConfig) -> None:
        self._init = init
        self._config = config
        if init.cache_dir:
            keep_kernels(init.cache_dir)
        gpu = init.gpus[init.rank] if init.gpus else str(init.rank)
        self._ordinal = cudriver.find_gpu(gpu).ordinal
        self.device = torch.device("cuda", self._ordinal)
        torch.cuda.set_device(self.device)
        self._flashinfer = importlib.import_module("flashinfer")
        self.sampler: Sampler = FlashSampler(self._flashinfer)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._count = torch.zeros(1, dtype=torch.int64, device=self.device)

    def problems(self) -> list[Problem]:
        return flash_problems(
            self._config, tp=self._init.tp, pass_tokens=self._init.max_batch_tokens
        )

    def auto_pool_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        pool = int(free * _AUTO_POOL_RATIO)
        if self._init.region_kind == "staged":
            pool = min(pool, int(available_bytes() * _MIRROR_RATIO / self._init.sharers))
        return pool

    def region_bytes(self, region: KvRegion) -> Tensor:
        """Cleared: what a GPU's memory held before might be no numbers."""
        gpu = region.gpu if isinstance(region, StagedRegion) else region
        assert isinstance(gpu, CumemRegion), "KV memory that is not the GPU's"
        return torch.as_tensor(gpu, device=self.device).zero_()

    def attention(self, layers: Sequence[LayerViews], geometry: KvGeometry) -> AttentionBackend:
        return self._attention(layers, geometry, None)

    def _attention(
        self, layers: Sequence[LayerViews], geometry: KvGeometry, fixed: FixedTables | None
    ) -> AttentionBackend:
        shape = FlashShape.of(self._config, tp=self._init.tp)
        return FlashAttention(
            self._flashinfer, layers, geometry, shape, self._workspace, fixed=fixed
        )

    def counter(self, page: MemfdRegion, wake_fds: list[int]) -> Callable[[], None]:
        """No GPU can wake a thread: `wake_fds` are not used."""
        return KernelCounter(
            page,
            self._ordinal,
            count_address=self._count.data_ptr(),
            stream=self.stream,
            code=compile_kernel(architecture_of(self._ordinal)),
        ).raise_layer

    def graphs(
        self,
        model: Decoder,
        layers: Sequence[LayerViews],
        geometry: KvGeometry,
        raise_layer: Callable[[], None],
    ) -> DecodeGraphs | None:
        """Not for experts, whose block asks the GPU which of them were chosen, and not for several
        ranks, whose exchanges nobody has recorded yet."""
        if not self._init.graph_rows or self._config.experts or self._init.tp > 1:
            return None
        pages = min(geometry.pages, geometry.pages_for(self._config.context_tokens))

        def attention(rows: int) -> AttentionBackend:
            return self._attention(layers, geometry, FixedTables(rows, rows * pages, self.device))

        sizes = graph_sizes(self._init.graph_rows)
        return DecodeGraphs(model, sizes, attention, raise_layer, CudaRecorder())

    def stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def finish(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

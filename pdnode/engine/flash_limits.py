"""What FlashInfer has kernels for (read in 0.7.4), checked before a model is loaded."""

from pdnode.errors import Problem
from pdnode.models.config import ModelConfig

_HEAD_DIMS = (64, 128, 256)
_LATENT_DIMS = (512, 64)  # latent and rotary numbers: what append and the MLA kernels are built for
_MAX_LATENT_HEADS = 128
_LATENT_TILE_ROWS = 128  # rows times heads of one tile of the MLA kernel
_MAX_LATENT_TILES = 16_000  # its planner has room for 16,384 pieces of work, splits included


def flash_problems(config: ModelConfig, *, tp: int, pass_tokens: int) -> list[Problem]:
    """What of a model FlashInfer has no kernels for, in passes of up to `pass_tokens` tokens."""
    found = []
    heads = config.heads // tp
    if config.latent is None:
        if config.head_dim not in _HEAD_DIMS:
            allowed = ", ".join(map(str, _HEAD_DIMS))
            text = f"{config.head_dim}; FlashInfer has kernels for {allowed}"
            found.append(Problem("config.json head_dim", text))
        return found
    dims = (config.latent.kv_rank, config.latent.rope_dim)
    if dims != _LATENT_DIMS:
        text = f"{dims}; FlashInfer has kernels for {_LATENT_DIMS}"
        found.append(Problem("config.json (kv_lora_rank, qk_rope_head_dim)", text))
    # Other numbers meet a rounding of its planner that would leave out a key; it refuses them.
    if heads & (heads - 1) or heads > _MAX_LATENT_HEADS:
        text = f"{heads} a rank; FlashInfer's MLA takes powers of two up to {_MAX_LATENT_HEADS}"
        found.append(Problem("config.json num_attention_heads", text))
    most = _MAX_LATENT_TILES * _LATENT_TILE_ROWS // heads
    if pass_tokens > most:
        text = f"{pass_tokens} tokens a pass; FlashInfer's MLA takes {most} with {heads} heads"
        found.append(Problem("[engine] chunk_tokens", text))
    return found

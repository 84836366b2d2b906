"""Generation with per-layer caches and causal routing."""

from mod_jax.sampling.generation import Generated, generate, pad_prompts
from mod_jax.sampling.logits import filter_logits
from mod_jax.sampling.speculation import Draft

__all__ = ('Draft', 'Generated', 'filter_logits', 'generate', 'pad_prompts')

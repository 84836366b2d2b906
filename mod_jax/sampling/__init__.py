"""Generation with per-layer caches and causal routing.

* `generation`: prefill, and the loop that adds tokens, up to an end token or
  the wanted number. (Texts that end a continuation: `serving.text_stream`.)
* `logits`: temperature, top-k, top-p and min-p filters.
* `speculation`: drafts of several tokens, which the model verifies.
* `transcripts`: decoding of CTC.

How routed blocks choose meanwhile is in `layers.rules`.
"""

from mod_jax.sampling.generation import Generated, generate, pad_prompts
from mod_jax.sampling.logits import filter_logits
from mod_jax.sampling.speculation import Draft

__all__ = ('Draft', 'Generated', 'filter_logits', 'generate', 'pad_prompts')

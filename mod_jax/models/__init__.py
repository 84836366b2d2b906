"""Models: configs and linen modules built from `mod_jax.layers`.

* `lm`: decoder-only language models; `vlm`: language models that read images;
* `vit`, `dynamic_vit`: image classifiers; `detr`: object detectors;
* `wav2vec2`: speech recognition;
* `protocol`: what the configs and outputs of all models have in common;
* `acm`: replaces modules of dense models by adaptive ones;
* `lora`: merges low-rank adapters into a model's weights.
"""

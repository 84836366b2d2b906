"""Linen modules, each with its config and its count of FLOPs.

* `stack`, `block`: the layers of a model, and the block in each of them;
* `attention`, `mlp`, `dense`, `rope`: parts of a block;
* `cache`: keys and values of earlier tokens, for decoding;
* `routed`, `routing_config`, `scores`, `rules`, `decisions`: Mixture-of-Depths;
* `experts`, `acm`: mixture of experts, and adaptive computation modules;
* `reduction`: blocks that merge or fuse tokens;
* `slots`: interface of the replaceable parts of a block; `lora` adapts them;
* `mode`, `token_info`: how a model runs, and facts about tokens;
* `quantized`, `vocabulary`: int8 products, and sampling, for inference;
* `resnet`, `stem`: convolutions before a transformer.
"""

"""Fields of a config.json that the tests of listed kernels change by architecture."""

BASE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 1024,
    "sliding_window": 256,
}

"""Text at the edge: tokenizer, chat template, incremental detokenizer, stop strings. Pure but for the tokenizer library."""

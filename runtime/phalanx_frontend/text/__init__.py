"""Text: tokenizer, chat template, incremental detokenizer, stop strings, tool call parsers. No I/O."""

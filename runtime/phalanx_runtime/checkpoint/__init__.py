"""Model folders: location, download, conversion, and the assets for the API server. No torch.

`locate.locate` returns a folder with config.json, safetensors, tokenizer.json and tokenizer_config.json.
"""

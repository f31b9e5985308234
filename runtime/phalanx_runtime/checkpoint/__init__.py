"""Model folders: where a model is, how it is fetched or converted, and what the door needs of it. No torch.

After `locate.locate` everything sees a folder with config.json, safetensors, tokenizer.json and tokenizer_config.json.
"""

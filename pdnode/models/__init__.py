"""Models: configuration, weights, forward pass, tokenizer, fingerprint; fetching the demo one."""

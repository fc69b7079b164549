"""KV memory of a rank: regions behind descriptors, tensor views of them, and their hand-over."""

"""Routes by which trainers' environments sample: token ids in, token ids with logprobs out."""

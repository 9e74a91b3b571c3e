"""The model: tokens and KV in, logits and KV out. torch is imported here and nowhere else."""

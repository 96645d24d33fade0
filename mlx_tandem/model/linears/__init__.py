"""Faster ways to compute a model's linears: several as one product, dequantised weights, a kernel for few rows."""

"""Products of linears: merged, by kernels for few rows, dequantised, or in a fixed order of sums."""

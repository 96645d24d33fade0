"""What a machine has to show before its answers are believed: small computations beside others that cannot be wrong."""

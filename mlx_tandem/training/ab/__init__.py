"""A/B tests of aliases: scores of live answers decide which arm answers alone."""

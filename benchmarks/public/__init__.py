"""A reader of the tests of other projects, with our parsers in the place of theirs."""

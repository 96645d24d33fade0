"""`tandem doctor --mac`: measurements on a Mac that are printed as one block of text for an issue."""

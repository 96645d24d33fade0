"""`tandem doctor --mac`: what the owner of a Mac runs once, for one block of text with what is unknown of Macs."""

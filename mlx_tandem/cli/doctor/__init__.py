"""`tandem doctor`: does it work here, and if not, what is wrong and what to do."""

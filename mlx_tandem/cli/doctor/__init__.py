"""`tandem doctor`: checks whether everything works on this machine, and says what is wrong and what to do."""

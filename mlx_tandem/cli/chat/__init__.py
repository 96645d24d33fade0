"""`tandem chat`: talk to a model of a running server, or of one that the command starts for itself."""

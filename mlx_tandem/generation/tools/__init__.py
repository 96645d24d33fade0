"""Tools: the functions that a request offers to the model, and the forms in which models write calls of them."""

"""What is done to the linears of a model beside adapters: products of several, packed weights, times."""

"""Tokenising long texts in a process of its own, so that neither time nor memory of the front goes into it."""

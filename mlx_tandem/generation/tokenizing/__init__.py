"""Tokenising long texts in a separate process, so that it costs the front neither time nor memory."""

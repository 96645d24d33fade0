"""Reasoning: the forms in which models write their thoughts before an answer."""

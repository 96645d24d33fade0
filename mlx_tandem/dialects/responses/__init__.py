"""OpenAI's dialect of responses: an answer is a list of items, and a response may continue an earlier one."""

"""OpenAI's batches: files of requests that are answered when the device has time, and files of their answers."""

"""Context parallelism: attention over a sequence whose tokens are spread over ranks."""

"""OpenAI's files and batches: on a disk that all gateways share, each batch carried out by one of them."""

"""OpenAI's API with vLLM's additions, as a server reads and answers it: for `hetlb engine` and for stages."""

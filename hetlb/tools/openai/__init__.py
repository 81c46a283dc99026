"""OpenAI's API with vLLM's additions: requests and answers of servers, and answers as clients read them."""

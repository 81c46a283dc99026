"""Workers that hold a range of a model's layers, and the coordinator that serves one model through them.

Worker: `worker` (connections and the loop), `batching`, `runner`, `checkpoint`, `torch_runner`.
Coordinator: `coordinator` drives `tools.paths`, `openai_api` speaks HTTP, `questions` reads requests, `text`
is the tokenizer. Both: `stage_messages`, `stage_channel`.
"""
